// y = x @ w^T with float32 sums. Included inside a namespace, after vec_*.h, tile.h and sums.h.
//
// Batch invariance: y[m, n] is computed by the same operations in the same order whatever the number of
// rows and whatever the kernel. K is cut into blocks of kBlock elements; inside a block, lane j of a vector
// sums its elements one after the other, and the lane sums are added to the total in order of the lanes.
//   few rows   `dot`: a vector runs along K, the lanes are summed at the end of a block
//   many rows  `tile`: a vector runs along N and a block is computed lane by lane, on weights that were
//              unpacked to float32 and transposed once for all rows

constexpr int64_t kGroup = 2 * kLanes;             // elements that a pair of load_half() takes
constexpr int64_t kBlockSteps = 256;               // of each lane: a lane of a weight panel stays in L1
constexpr int64_t kBlock = kBlockSteps * kLanes;   // elements of K
constexpr int64_t kDotRows = 16;                   // up to here, `dot`
constexpr int64_t kDotCols = 12;                   // channels that `dot` takes at once
constexpr int64_t kPassRows = 516;                 // rows that `tile` takes at once: bounds the scratch memory
constexpr int64_t kChunkBytes = 128 << 10;         // of weights: what a thread takes at a time
constexpr int64_t kPackedChunkBytes = 64 << 10;    // of packed ones, at most

struct PanelTag {};

// Where element `o` of a group ends up after load_half(): its half and its lane.
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

// ---- few rows ----

// Floats from one row of x to the next: off a power of two, whose rows would fight for cache sets.
inline int64_t dot_row_stride(int64_t k) { return round_up(k, 128) + 48; }

// x as float32 in the order of load_half(), with zeros up to round_up(k, kGroup).
template <typename W, typename X>
void unpack_for_dot(const X* x, int64_t m, int64_t k, float* out) {
  const int64_t padded = round_up(k, kGroup);
  for (int64_t row = 0; row < m; ++row, x += k, out += dot_row_stride(k)) {
    for (int64_t g = 0; g < padded; g += kGroup) {
      for (int o = 0; o < kGroup; ++o) {
        const float value = g + o < k ? to_float(x[g + o]) : 0.0f;
        out[g + pair_half<W>(o) * kLanes + pair_lane<W>(o)] = value;
      }
    }
  }
}

// Adds elements [begin, end) of K, whole groups, to the lane sums acc[r * acc_row + c] of kRows rows and
// kCols channels.
template <int kRows, int kCols, typename W>
inline void dot(const float* x, int64_t x_row, const W* w, int64_t k, int64_t begin, int64_t end, float* acc,
                int64_t acc_row) {
  vf sum[kRows][kCols];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) sum[r][c] = load(acc + r * acc_row + c * kLanes);
  }
  for (int64_t i = begin; i < end; i += kGroup) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) __builtin_prefetch(w + (c + kDotCols) * k + i, 0, 2);
    // One half of the group after the other: kCols vectors of w stay in registers for all rows.
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      vf y[kCols];
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) y[c] = load_half(w + c * k + i, half);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const vf v = load(x + r * x_row + i + half * kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < kCols; ++c) sum[r][c] = fma(v, y[c], sum[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) store(acc + r * acc_row + c * kLanes, sum[r][c]);
  }
}

// The same for any number of rows and for kDotCols channels.
template <int kRows, int kCols, typename W>
inline void dot_cols(const float* x, int64_t x_row, const W* w, int64_t k, int64_t begin, int64_t end, float* acc) {
  for (int c = 0; c < kDotCols; c += kCols) {
    dot<kRows, kCols, W>(x, x_row, w + c * k, k, begin, end, acc + c * kLanes, kDotCols * kLanes);
  }
}

// y of `cols` <= kDotCols channels from `col` on.
template <typename W>
void dot_channels(const LinearArgs& args, const float* x, int64_t col, int64_t cols) {
  const int64_t k = args.k, m = args.m, x_row = dot_row_stride(k), full = k / kGroup * kGroup;
  const W* w = static_cast<const W*>(args.w) + col * k;
  const int64_t sums = round_up(m * kDotCols, kLanes);
  // What all rows need of x at a time stays in L1.
  const int64_t piece = m <= 2 ? kBlock : m <= 4 ? kBlock / 2 : m <= 12 ? kBlock / 4 : kBlock / 8;
  float total[kDotRows * kDotCols] = {};
  for (int64_t start = 0; start < k; start += kBlock) {
    float acc[kDotRows * kDotCols * kLanes];
    std::memset(acc, 0, sums * kLanes * sizeof(float));
    const int64_t end = start + kBlock < full ? start + kBlock : full;
    for (int64_t begin = start; begin < end; begin += piece) {
      const int64_t stop = begin + piece < end ? begin + piece : end;
      if (cols < kDotCols) {
        for (int64_t r = 0; r < m; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            dot<1, 1, W>(x + r * x_row, x_row, w + c * k, k, begin, stop, acc + (r * kDotCols + c) * kLanes, 0);
          }
        }
        continue;
      }
      const int64_t tiles = (m + 3) / 4;
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = m * i / tiles, rows = m * (i + 1) / tiles - row;
        const float* xs = x + row * x_row;
        float* part = acc + row * kDotCols * kLanes;
        switch (rows) {
          case 1: dot_cols<1, 4, W>(xs, x_row, w, k, begin, stop, part); break;
          case 2: dot_cols<2, 4, W>(xs, x_row, w, k, begin, stop, part); break;
          case 3: dot_cols<3, 3, W>(xs, x_row, w, k, begin, stop, part); break;
          case 4: dot_cols<4, 3, W>(xs, x_row, w, k, begin, stop, part); break;
        }
      }
    }
    if (full < k && k <= start + kBlock) {
      for (int64_t c = 0; c < cols; ++c) {
        W tail[kGroup];
        padded_tail(w + c * k, full, k, tail);
        for (int64_t r = 0; r < m; ++r) {
          dot<1, 1, W>(x + r * x_row + full, x_row, tail, 0, 0, kGroup, acc + (r * kDotCols + c) * kLanes, 0);
        }
      }
    }
    for (int64_t i = 0; i < sums; i += kLanes) store(total + i, add_lanes_in_order(load(total + i), acc + i * kLanes));
  }
  for (int64_t r = 0; r < m; ++r) write_sums(args, r, col, cols, total + r * kDotCols);
}

template <typename W>
void linear_dot(const LinearArgs& args, Pool& pool) {
  float* x = thread_scratch<XTag>(args.m * dot_row_stride(args.k));
  if (args.x_dtype == Dtype::kBfloat16) {
    unpack_for_dot<W>(static_cast<const bf16*>(args.x), args.m, args.k, x);
  } else {
    unpack_for_dot<W>(static_cast<const float*>(args.x), args.m, args.k, x);
  }
  int64_t chunk = kChunkBytes / static_cast<int64_t>(args.k * sizeof(W)) / kDotCols * kDotCols;
  if (chunk < kDotCols) chunk = kDotCols;
  pool.parallel_for((args.n + chunk - 1) / chunk, [&args, x, chunk](int64_t i) {
    const int64_t end = (i + 1) * chunk < args.n ? (i + 1) * chunk : args.n;
    for (int64_t col = i * chunk; col < end; col += kDotCols) {
      dot_channels<W>(args, x, col, end - col < kDotCols ? end - col : kDotCols);
    }
  });
}

// ---- many rows ----

// Rows [first, first + rows) of x, one row tile of m rows, as float32. All of them are laid out [block of K]
// [lane][row tile][step][row of the tile].
template <typename W, typename X>
void unpack_for_tile(const X* x, int64_t m, int64_t k, int64_t first, int rows, float* out) {
  const int64_t padded = round_up(k, kGroup);
  x += first * k;
  for (int64_t start = 0; start < padded; start += kBlock) {
    const int64_t length = padded - start < kBlock ? padded - start : kBlock, steps = length / kLanes;
    const int64_t lane_stride = m * steps;
    float* to = out + m * start + first * steps;
    int64_t g = start;
    if (sizeof(X) == sizeof(W) && rows >= 3 && rows <= kLanes) {
      // Writes kLanes rows: those past the last are overwritten by the next step, so the last group is left.
      const auto row = [&](int r) { return x + (r < rows ? r : rows - 1) * k + g; };
      for (; g + kGroup < start + length; g += kGroup, to += 2 * rows) {
        store_pairs_transposed(x, row, to, lane_stride, rows);
      }
    }
    for (; g < start + length; g += kGroup, to += 2 * rows) {
      for (int r = 0; r < rows; ++r) {
        for (int o = 0; o < kGroup; ++o) {
          const float value = g + o < k ? to_float(x[r * k + g + o]) : 0.0f;
          to[pair_lane<W>(o) * lane_stride + pair_half<W>(o) * rows + r] = value;
        }
      }
    }
  }
}

// Rows [top, top + m) of x, laid out like that.
template <typename W>
void unpack_rows(const LinearArgs& args, int64_t top, int64_t m, float* out, Pool& pool) {
  const int64_t k = args.k, tiles = (m + kTileRows - 1) / kTileRows;
  const auto unpack = [&args, top, m, tiles, k, out](int64_t i) {
    const int64_t row = m * i / tiles;
    const int rows = static_cast<int>(m * (i + 1) / tiles - row);
    if (args.x_dtype == Dtype::kBfloat16) {
      unpack_for_tile<W>(static_cast<const bf16*>(args.x) + top * k, m, k, row, rows, out);
    } else {
      unpack_for_tile<W>(static_cast<const float*>(args.x) + top * k, m, k, row, rows, out);
    }
  };
  if (m * k < kThreadedUnpack) {
    for (int64_t i = 0; i < tiles; ++i) unpack(i);
  } else {
    pool.parallel_for(tiles, unpack);
  }
}

// Floats from one lane of a panel to the next: off a power of two, whose lanes would fight for cache sets.
inline int64_t panel_lane_stride(int64_t steps) { return steps * kTileCols + kTileCols; }

// kTileCols output channels of w, elements [start, start + length) of K, as float32 laid out
// [lane][step][channel]. Channels past n repeat the last one.
template <typename W>
void pack_panel(const W* w, int64_t n, int64_t k, int64_t col, int64_t start, int64_t length, float* out) {
  const int64_t lane_stride = panel_lane_stride(length / kLanes);
  // Rows that lie a multiple of 4096 bytes apart share their cache sets, so pieces of them are copied first.
  constexpr int64_t kPiece = 512 / sizeof(W), kRow = kPiece + 64 / sizeof(W);
  constexpr int64_t kVector = kLanes * sizeof(float) / sizeof(W);  // elements
  alignas(64) W piece[kTileCols * kRow];
  for (int64_t i = start; i < start + length; i += kPiece) {
    const int64_t real = k - i < kPiece ? k - i : kPiece;
    for (int64_t c = 0; c < kTileCols; ++c) {
      const W* from = w + (col + c < n ? col + c : n - 1) * k + i;
      W* to = piece + c * kRow;
      if (real == kPiece) {
        for (int64_t o = 0; o < kPiece; o += kVector) {
          store(reinterpret_cast<float*>(to + o), load(reinterpret_cast<const float*>(from + o)));
        }
      } else {
        std::memset(static_cast<void*>(to), 0, kPiece * sizeof(W));
        std::memcpy(static_cast<void*>(to), from, real * sizeof(W));
      }
    }
    for (int64_t g = 0; g < kPiece && i + g < start + length; g += kGroup, out += 2 * kTileCols) {
      const W* first = piece + g;
      for (int half = 0; half < kTileCols; half += kLanes) {
        const auto row = [=](int c) { return first + (half + c) * kRow; };
        store_pairs_transposed(first, row, out + half, lane_stride, kTileCols);
      }
    }
  }
}

// sums[r, :] += (a lane of rows x) * (a lane of the panel).
inline void add_tile(int rows, const float* x, const float* panel, int64_t steps, float* sums, const void* ahead,
                     int64_t ahead_bytes) {
  const char* const p = static_cast<const char*>(ahead);
  with_rows<kTileRows>(rows, [&](auto count) {
    tile<count, 1, Into::kAdd>(x, 1, count, panel, 0, steps, sums, kTileCols, p, ahead_bytes);
  });
}

template <typename W>
void linear_tile(const LinearArgs& args, Pool& pool) {
  const int64_t n = args.n, k = args.k, padded = round_up(k, kGroup);
  const W* w = static_cast<const W*>(args.w);
  for (int64_t top = 0; top < args.m; top += kPassRows) {
    const int64_t m = args.m - top < kPassRows ? args.m - top : kPassRows;
    float* xs = thread_scratch<XTag>(m * padded);

    unpack_rows<W>(args, top, m, xs, pool);

    const int64_t panels = (n + kTileCols - 1) / kTileCols;
    int64_t chunk = kChunkBytes / static_cast<int64_t>(k * sizeof(W) * kTileCols);
    if (chunk < 1) chunk = 1;
    pool.parallel_for((panels + chunk - 1) / chunk, [&args, w, n, k, padded, top, m, xs, panels, chunk](int64_t i) {
      float* panel = thread_scratch<PanelTag>(kLanes * panel_lane_stride(kBlockSteps));
      float* sums = thread_scratch<SumTag>(m * kTileCols);
      const int64_t end = (i + 1) * chunk < panels ? (i + 1) * chunk : panels;
      for (int64_t p = i * chunk; p < end; ++p) {
        const int64_t col = p * kTileCols, cols = n - col < kTileCols ? n - col : kTileCols;
        std::memset(sums, 0, m * kTileCols * sizeof(float));
        for (int64_t start = 0; start < padded; start += kBlock) {
          const int64_t length = padded - start < kBlock ? padded - start : kBlock, steps = length / kLanes;
          pack_panel(w, n, k, col, start, length, panel);
          // While a lane is computed, an eighth of the weights that are packed next comes from memory.
          const bool same_panel = start + kBlock < padded;
          const W* next = same_panel ? w + col * k + start + kBlock : w + (col + kTileCols) * k;
          if (!same_panel && col + 2 * kTileCols > n) next = w + col * k;
          for (int64_t j = 0; j < kLanes; ++j) {
            const W* ahead = next + j * (kTileCols / kLanes) * k;
            for_each_row_tile(m, [&](int64_t row, int rows) {
              add_tile(rows, xs + m * start + j * m * steps + row * steps, panel + j * panel_lane_stride(steps),
                       steps, sums + row * kTileCols, ahead, row == 0 ? 64 : 0);
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
  if (args.m <= kDotRows) {
    linear_dot<W>(args, pool);
  } else {
    linear_tile<W>(args, pool);
  }
}

void linear(const LinearArgs& args, Pool& pool) {
  if (args.w_dtype == Dtype::kBfloat16) {
    linear_typed<bf16>(args, pool);
  } else {
    linear_typed<float>(args, pool);
  }
}
