// The register tile that the kernels are made of. Included inside a namespace, after a vec_*.h.

// Columns of a tile: two vectors, or one of AVX-512.
constexpr int kTileCols = kTileVectors * kLanes;
// Rows of a tile. 12 accumulators, 2 vectors of b and 1 of a fill 16 registers; one of AVX-512 has as many
// accumulators, which two units with a latency of 4 keep busy.
constexpr int kTileRows = 12 / kTileVectors;

enum class Into {
  kFresh,     // c = sum
  kAdd,       // c = c + sum, the sum starting from 0
  kContinue,  // c is where the sum starts
};

// c[r, :] (+)= sum_s a[r * a_row + s * a_step] * b[s * kTileCols + :] for s in [0, steps), in order of s, for
// kRows rows and kPanels panels of kTileCols columns; the next panel of b is b_panel floats further on.
// Each c[r, col] is one chain of fused multiply-adds, whatever the number of rows and panels. Every second
// step asks the memory for the line at `ahead`, which then moves on by `ahead_bytes`.
template <int kRows, int kPanels, Into kInto>
inline void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_panel, int64_t steps,
                 float* c, int64_t c_row, const char* ahead, int64_t ahead_bytes) {
  constexpr int kVectors = kTileVectors * kPanels;
  vf acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = kInto == Into::kContinue ? load(c + r * c_row + v * kLanes) : zero();
    }
  }
  const auto step = [&] {
    if constexpr (kPanels == 1) {  // hold b, one x at a time
      vf y[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) y[v] = load(b + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const vf x = set1(a[r * a_row]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, y[v], acc[r][v]);
      }
    } else {  // hold the few x, one vector of b at a time
      vf x[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) x[r] = set1(a[r * a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const vf y = load(b + v / kTileVectors * b_panel + v % kTileVectors * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r][v] = fma(x[r], y, acc[r][v]);
      }
    }
    a += a_step;
    b += kTileCols;
  };
  for (int64_t s = 0; s < steps / 2; ++s) {
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_bytes;
    step();
    step();
  }
  if (steps % 2 != 0) step();
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* out = c + r * c_row + v * kLanes;
      store(out, kInto == Into::kAdd ? add(load(out), acc[r][v]) : acc[r][v]);
    }
  }
}

// fn(a constant of value `rows`), which is in [1, kMost].
template <int kMost, typename Fn>
inline void with_rows(int rows, const Fn& fn) {
  if (rows == kMost) return fn(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_rows<kMost - 1>(rows, fn);
}

// Cuts `rows` into nearly equal tiles of at most kMost: fn(first row, rows of the tile).
template <int kMost = kTileRows, typename Fn>
inline void for_each_row_tile(int64_t rows, const Fn& fn) {
  const int64_t tiles = (rows + kMost - 1) / kMost;
  int64_t row = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t end = rows * (i + 1) / tiles;
    fn(row, static_cast<int>(end - row));
    row = end;
  }
}
