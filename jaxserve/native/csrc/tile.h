// The register tile that both kernels are made of. Included inside a namespace, after a vec_*.h.

// Columns of a tile: two vectors.
constexpr int kTileCols = 2 * kLanes;
// Rows of a tile: 12 accumulators, 2 vectors of b and 1 of a fill the 16 registers.
constexpr int kTileRows = 6;

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
  constexpr int kVectors = 2 * kPanels;
  vf acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = kInto == Into::kContinue ? load(c + r * c_row + v * kLanes) : zero();
    }
  }
  const auto step = [&] {
    if constexpr (kPanels == 1) {  // hold b, one x at a time
      const vf b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const vf x = set1(a[r * a_row]);
        acc[r][0] = fma(x, b0, acc[r][0]);
        acc[r][1] = fma(x, b1, acc[r][1]);
      }
    } else {  // hold the few x, one vector of b at a time
      vf x[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) x[r] = set1(a[r * a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const vf y = load(b + v / 2 * b_panel + v % 2 * kLanes);
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
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* out = c + r * c_row + v * kLanes;
      store(out, kInto == Into::kAdd ? add(load(out), acc[r][v]) : acc[r][v]);
    }
  }
}

// Cuts `rows` into nearly equal tiles: fn(first row, rows of the tile).
template <typename Fn>
inline void for_each_row_tile(int64_t rows, const Fn& fn) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t row = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t end = rows * (i + 1) / tiles;
    fn(row, static_cast<int>(end - row));
    row = end;
  }
}
