// y = x @ w^T with float32 sums. Included inside a namespace, after vec_*.h and tile.h.
//
// Batch invariance: y[m, n] is computed by the same operations in the same order whatever the number of
// rows and whatever the kernel. K is cut into blocks of kBlock elements; inside a block, lane j of a vector
// sums its elements one after the other, and the lane sums are added to the total in order of the lanes.
//   few rows   `dot`: a vector runs along K, the lanes are summed at the end of a block
//   many rows  `tile`: a vector runs along N and a block is computed lane by lane, on weights that were
//              unpacked to float32 and transposed once for all rows

constexpr int64_t kGroup = 2 * kLanes;             // elements that one load_pair() takes
constexpr int64_t kBlockSteps = 256;               // of each lane: a lane of a weight panel stays in L1
constexpr int64_t kBlock = kBlockSteps * kLanes;   // elements of K
constexpr int64_t kPassRows = 504;                 // rows that `tile` takes at once: bounds the scratch memory
constexpr int64_t kChunkBytes = 128 << 10;         // of weights: what a thread takes at a time

struct XTag {};
struct PanelTag {};
struct SumTag {};

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Where element `o` of a group ends up after load_pair(): its vector (0 or 1) and its lane.
template <typename W>
inline int pair_half(int o) { return sizeof(W) == 2 ? o & 1 : o / kLanes; }
template <typename W>
inline int pair_lane(int o) { return sizeof(W) == 2 ? o >> 1 : o % kLanes; }

// The last, partial group of a row of weights, filled up with zeros.
template <typename W>
inline const W* padded_tail(const W* row, int64_t full, int64_t k, W tail[kGroup]) {
  std::memset(static_cast<void*>(tail), 0, kGroup * sizeof(W));
  std::memcpy(static_cast<void*>(tail), row + full, (k - full) * sizeof(W));
  return tail;
}

inline void write_sums(const LinearArgs& args, int64_t row, int64_t col, int64_t cols, const float* sums) {
  if (args.y_dtype == Dtype::kBfloat16) {
    bf16* y = static_cast<bf16*>(args.y) + row * args.n + col;
    for (int64_t c = 0; c < cols; ++c) from_float(sums[c], y + c);
  } else {
    std::memcpy(static_cast<float*>(args.y) + row * args.n + col, sums, cols * sizeof(float));
  }
}

// ---- few rows ----

// x as float32 in the order of load_pair(), rows of round_up(k, kGroup) with zeros at the end.
template <typename W, typename X>
void unpack_for_dot(const X* x, int64_t m, int64_t k, float* out) {
  const int64_t padded = round_up(k, kGroup);
  for (int64_t row = 0; row < m; ++row, x += k, out += padded) {
    for (int64_t g = 0; g < padded; g += kGroup) {
      for (int o = 0; o < kGroup; ++o) {
        const float value = g + o < k ? to_float(x[g + o]) : 0.0f;
        out[g + pair_half<W>(o) * kLanes + pair_lane<W>(o)] = value;
      }
    }
  }
}

template <int kRows, int kCols, typename W>
void dot(const LinearArgs& args, const float* x, int64_t col) {
  const int64_t k = args.k;
  const W* w = static_cast<const W*>(args.w) + col * k;
  const int64_t padded = round_up(k, kGroup), full = k / kGroup * kGroup;
  float total[kRows][kCols] = {};
  for (int64_t start = 0; start < padded; start += kBlock) {
    vf acc[kRows][kCols];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) acc[r][c] = zero();
    }
    const int64_t end = start + kBlock < full ? start + kBlock : full;
    for (int64_t i = start; i < end; i += kGroup) {
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) {
        vf a, b;
        load_pair(w + c * k + i, a, b);
        __builtin_prefetch(w + (c + kCols) * k + i, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          acc[r][c] = fma(load(x + r * padded + i), a, acc[r][c]);
          acc[r][c] = fma(load(x + r * padded + i + kLanes), b, acc[r][c]);
        }
      }
    }
    if (end == full && full < padded && padded <= start + kBlock) {
      for (int c = 0; c < kCols; ++c) {
        W tail[kGroup];
        vf a, b;
        load_pair(padded_tail(w + c * k, full, k, tail), a, b);
        for (int r = 0; r < kRows; ++r) {
          acc[r][c] = fma(load(x + r * padded + full), a, acc[r][c]);
          acc[r][c] = fma(load(x + r * padded + full + kLanes), b, acc[r][c]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kCols; ++c) {
        float lanes[kLanes];
        store(lanes, acc[r][c]);
        for (int j = 0; j < kLanes; ++j) total[r][c] += lanes[j];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) write_sums(args, r, col, kCols, total[r]);
}

template <int kRows, typename W>
void linear_dot(const LinearArgs& args, Pool& pool) {
  constexpr int kCols = kRows == 4 ? 3 : 4;
  const int64_t k = args.k, n = args.n;
  float* x = thread_scratch<XTag>(kRows * round_up(k, kGroup));
  if (args.x_dtype == Dtype::kBfloat16) {
    unpack_for_dot<W>(static_cast<const bf16*>(args.x), kRows, k, x);
  } else {
    unpack_for_dot<W>(static_cast<const float*>(args.x), kRows, k, x);
  }

  int64_t chunk = kChunkBytes / static_cast<int64_t>(k * sizeof(W)) / kCols * kCols;
  if (chunk < kCols) chunk = kCols;
  pool.parallel_for((n + chunk - 1) / chunk, [&args, x, chunk](int64_t i) {
    int64_t col = i * chunk;
    const int64_t end = col + chunk < args.n ? col + chunk : args.n;
    for (; col + kCols <= end; col += kCols) dot<kRows, kCols, W>(args, x, col);
    for (; col < end; ++col) dot<kRows, 1, W>(args, x, col);
  });
}

// ---- many rows ----

// x as float32, laid out [block of K][lane][row tile][step][row of the tile].
template <typename W, typename X>
void unpack_for_tile(const X* x, int64_t m, int64_t k, int64_t first, int rows, float* out) {
  const int64_t padded = round_up(k, kGroup);
  for (int64_t start = 0; start < padded; start += kBlock) {
    const int64_t length = padded - start < kBlock ? padded - start : kBlock, steps = length / kLanes;
    float* block = out + m * start + first * steps;
    for (int r = 0; r < rows; ++r) {
      const X* row = x + (first + r) * k;
      for (int64_t i = 0; i < length; ++i) {
        const int o = i % kGroup;
        const int64_t step = i / kGroup * 2 + pair_half<W>(o);
        block[pair_lane<W>(o) * (m * steps) + step * rows + r] = start + i < k ? to_float(row[start + i]) : 0.0f;
      }
    }
  }
}

// kTileCols output channels of w, elements [start, start + length) of K, as float32 laid out
// [lane][step][channel]. Channels past n repeat the last one.
template <typename W>
void pack_panel(const W* w, int64_t n, int64_t k, int64_t col, int64_t start, int64_t length, float* out) {
  const int64_t full = k / kGroup * kGroup, lane_stride = length / kLanes * kTileCols;
  for (int half = 0; half < 2; ++half) {
    const W* rows[kLanes];
    for (int c = 0; c < kLanes; ++c) {
      const int64_t channel = col + half * kLanes + c;
      rows[c] = w + (channel < n ? channel : n - 1) * k;
    }
    float* dst = out + half * kLanes;
    for (int64_t i = 0; i < length; i += kGroup, dst += 2 * kTileCols) {
      const W* group[kLanes];
      W tail[kLanes][kGroup];
      for (int c = 0; c < kLanes; ++c) group[c] = rows[c] + start + i;
      if (start + i >= full) {
        for (int c = 0; c < kLanes; ++c) group[c] = padded_tail(rows[c], full, k, tail[c]);
      }
      vf a[kLanes], b[kLanes];
      load_pairs_transposed(group, a, b);
      for (int j = 0; j < kLanes; ++j) {
        store(dst + j * lane_stride, a[j]);
        store(dst + j * lane_stride + kTileCols, b[j]);
      }
    }
  }
}

template <typename W>
void linear_tile(const LinearArgs& args, Pool& pool) {
  const int64_t n = args.n, k = args.k, padded = round_up(k, kGroup);
  const W* w = static_cast<const W*>(args.w);
  for (int64_t top = 0; top < args.m; top += kPassRows) {
    const int64_t m = args.m - top < kPassRows ? args.m - top : kPassRows;
    float* xs = thread_scratch<XTag>(m * padded);

    const int64_t tiles = (m + kTileRows - 1) / kTileRows;
    const auto unpack = [&args, top, m, tiles, k, xs](int64_t i) {
      const int64_t row = m * i / tiles;
      const int rows = static_cast<int>(m * (i + 1) / tiles - row);
      if (args.x_dtype == Dtype::kBfloat16) {
        unpack_for_tile<W>(static_cast<const bf16*>(args.x) + top * k, m, k, row, rows, xs);
      } else {
        unpack_for_tile<W>(static_cast<const float*>(args.x) + top * k, m, k, row, rows, xs);
      }
    };
    if (m * k < 100000) {
      for (int64_t i = 0; i < tiles; ++i) unpack(i);
    } else {
      pool.parallel_for(tiles, unpack);
    }

    const int64_t panels = (n + kTileCols - 1) / kTileCols;
    int64_t chunk = kChunkBytes / static_cast<int64_t>(k * sizeof(W) * kTileCols);
    if (chunk < 1) chunk = 1;
    pool.parallel_for((panels + chunk - 1) / chunk, [&args, w, n, k, padded, top, m, xs, panels, chunk](int64_t i) {
      float* panel = thread_scratch<PanelTag>(kBlock * kTileCols);
      float* sums = thread_scratch<SumTag>(m * kTileCols);
      const int64_t end = (i + 1) * chunk < panels ? (i + 1) * chunk : panels;
      for (int64_t p = i * chunk; p < end; ++p) {
        const int64_t col = p * kTileCols, cols = n - col < kTileCols ? n - col : kTileCols;
        std::memset(sums, 0, m * kTileCols * sizeof(float));
        for (int64_t start = 0; start < padded; start += kBlock) {
          const int64_t length = padded - start < kBlock ? padded - start : kBlock, steps = length / kLanes;
          pack_panel(w, n, k, col, start, length, panel);
          for (int64_t j = 0; j < kLanes; ++j) {
            for_each_row_tile(m, [&](int64_t row, int rows) {
              tile<Into::kAdd>(rows, xs + m * start + j * m * steps + row * steps, 1, rows,
                               panel + j * steps * kTileCols, steps, sums + row * kTileCols, kTileCols);
            });
          }
        }
        for (int64_t r = 0; r < m; ++r) write_sums(args, top + r, col, cols, sums + r * kTileCols);
      }
    });
  }
}

template <typename W>
void linear_typed(const LinearArgs& args, Pool& pool) {
  switch (args.m) {
    case 1: return linear_dot<1, W>(args, pool);
    case 2: return linear_dot<2, W>(args, pool);
    case 3: return linear_dot<3, W>(args, pool);
    case 4: return linear_dot<4, W>(args, pool);
    default: return linear_tile<W>(args, pool);
  }
}

void linear(const LinearArgs& args, Pool& pool) {
  if (args.w_dtype == Dtype::kBfloat16) {
    linear_typed<bf16>(args, pool);
  } else {
    linear_typed<float>(args, pool);
  }
}
