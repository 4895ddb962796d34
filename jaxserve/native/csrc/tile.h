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

// c[r, :] (+)= sum_s a[r * a_row + s * a_step] * b[s * kTileCols + :] for s in [0, steps), in order of s.
// Each c[r, col] is one chain of fused multiply-adds, whatever the number of rows.
template <int kRows, Into kInto>
inline void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t steps, float* c,
                 int64_t c_row) {
  vf acc[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (kInto == Into::kContinue) {
      acc[r][0] = load(c + r * c_row);
      acc[r][1] = load(c + r * c_row + kLanes);
    } else {
      acc[r][0] = acc[r][1] = zero();
    }
  }
#pragma GCC unroll 2
  for (int64_t s = 0; s < steps; ++s) {
    const vf b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const vf x = set1(a[r * a_row]);
      acc[r][0] = fma(x, b0, acc[r][0]);
      acc[r][1] = fma(x, b1, acc[r][1]);
    }
    a += a_step;
    b += kTileCols;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* out = c + r * c_row;
    if (kInto == Into::kAdd) {
      store(out, add(load(out), acc[r][0]));
      store(out + kLanes, add(load(out + kLanes), acc[r][1]));
    } else {
      store(out, acc[r][0]);
      store(out + kLanes, acc[r][1]);
    }
  }
}

template <Into kInto>
inline void tile(int rows, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t steps, float* c,
                 int64_t c_row) {
  switch (rows) {
    case 1: return tile<1, kInto>(a, a_row, a_step, b, steps, c, c_row);
    case 2: return tile<2, kInto>(a, a_row, a_step, b, steps, c, c_row);
    case 3: return tile<3, kInto>(a, a_row, a_step, b, steps, c, c_row);
    case 4: return tile<4, kInto>(a, a_row, a_step, b, steps, c, c_row);
    case 5: return tile<5, kInto>(a, a_row, a_step, b, steps, c, c_row);
    case 6: return tile<6, kInto>(a, a_row, a_step, b, steps, c, c_row);
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
