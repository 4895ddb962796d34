// y = x @ w^T on float32 weights that were packed once, when they were loaded. Included after linear_kernel.h,
// whose sums it computes: the same elements in the same order, so the bits are equal.
//
// A matrix [n, k], n a multiple of kTileCols and k of kGroup, is cut into panels of kTileCols output channels,
// and stays as large as it was. A panel is [block of K][pair of lanes][step][lane of the pair][channel]:
// few rows take both lanes of a pair at once, so that they read memory in sequence; load_half() of a step
// gives the first and the last kLanes channels.

constexpr int64_t kDirectRows = 8;               // more rows read weights that were widened once for all

struct WideTag {};

// One panel: kTileCols rows of w.
inline void pack_rows(const float* w, int64_t k, float* out) {
  for (int64_t start = 0; start < k; start += kBlock) {
    const int64_t length = k - start < kBlock ? k - start : kBlock, steps = length / kLanes;
    float* block = out + start * kTileCols;
    for (int c = 0; c < kTileCols; ++c) {
      const float* row = w + c * k + start;
      for (int64_t g = 0; g < length; g += kGroup) {
        float* to = block + 2 * (g / kLanes) * kTileCols + c;
        for (int o = 0; o < kGroup; ++o) {
          const int lane = pair_lane<float>(o);
          to[(lane / 2 * (2 * steps) + pair_half<float>(o) * 2 + lane % 2) * kTileCols] = row[g + o];
        }
      }
    }
  }
}

void pack(const PackArgs& args, Pool& pool) {
  const int64_t panel = args.k * kTileCols;  // elements
  pool.parallel_for(args.rows / kTileCols, [&args, panel](int64_t i) {
    pack_rows(static_cast<const float*>(args.w) + i * panel, args.k, static_cast<float*>(args.out) + i * panel);
  });
}

// sums[r, :] += (a lane of rows x) * (a lane of weights), for kSide lanes whose weights lie side by side, one
// after the other; a step of weights is kStep elements. Together they are chains enough to keep the units
// busy. On the way the cache lines at `ahead` are asked for, kSide of them every second step, `ahead_bytes`
// apart. Not inlined: inside a larger function GCC runs out of registers, and sums go through memory.
template <int kRows, int kSide, int kStep>
__attribute__((noinline)) void packed_tile(const float* x, int64_t x_lane, const float* w, int64_t steps, float* sums,
                                           const char* ahead, int64_t ahead_bytes) {
  vf acc[kSide][kRows][2];
#pragma GCC unroll 8
  for (int l = 0; l < kSide; ++l) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[l][r][0] = acc[l][r][1] = zero();
  }
  const auto step = [&] {
#pragma GCC unroll 8
    for (int l = 0; l < kSide; ++l) {
      const vf b0 = load_half(w + l * kTileCols, 0), b1 = load_half(w + l * kTileCols, 1);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const vf v = set1(x[l * x_lane + r]);
        acc[l][r][0] = fma(v, b0, acc[l][r][0]);
        acc[l][r][1] = fma(v, b1, acc[l][r][1]);
      }
    }
    x += kRows;
    w += kStep;
  };
  for (int64_t s = 0; s < steps; s += 2) {  // steps are even: a group has two
#pragma GCC unroll 2
    for (int l = 0; l < kSide; ++l, ahead += ahead_bytes) __builtin_prefetch(ahead, 0, 2);
    step();
    step();
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      float* out = sums + r * kTileCols + v * kLanes;
      vf total = load(out);
#pragma GCC unroll 8
      for (int l = 0; l < kSide; ++l) total = add(total, acc[l][r][v]);
      store(out, total);
    }
  }
}

// What is read next while lane j of a block is computed: blocks and panels lie one after the other.
inline const char* after_lane(const float* block, int64_t j, int64_t steps) {
  return reinterpret_cast<const char*>(block + (j + 2) * steps * kTileCols);
}

// Lane j of a block.
inline const float* lane_of(const float* block, int64_t j, int64_t steps) {
  return block + (j / 2 * (2 * steps) + j % 2) * kTileCols;
}

// All lanes of a block, for one row tile.
template <int kRows, int kSide>
inline void add_lanes(const float* x, int64_t x_lane, const float* block, int64_t steps, float* sums, int64_t ahead_bytes) {
  for (int j = 0; j < kLanes; j += kSide, x += kSide * x_lane) {
    packed_tile<kRows, kSide, 2 * kTileCols>(x, x_lane, lane_of(block, j, steps), steps, sums,
                                             after_lane(block, j, steps), ahead_bytes);
  }
}

inline void add_block(int rows, const float* x, int64_t x_lane, const float* block, int64_t steps, float* sums,
               int64_t ahead_bytes) {
  with_rows<kTileRows>(rows, [&](auto count) {
    add_lanes<count, count <= 3 ? 2 : 1>(x, x_lane, block, steps, sums, ahead_bytes);
  });
}

// A lane of a block as float32, [step][channel].
inline void widen(const float* w, int64_t steps, float* out) {
  for (int64_t s = 0; s < steps; ++s, w += 2 * kTileCols, out += kTileCols) {
    store(out, load_half(w, 0));
    store(out + kLanes, load_half(w, 1));
  }
}

inline void add_wide_lane(int rows, const float* x, const float* wide, int64_t steps, float* sums, const char* ahead,
                          int64_t ahead_bytes) {
  with_rows<kTileRows>(rows, [&](auto count) {
    packed_tile<count, 1, kTileCols>(x, 0, wide, steps, sums, ahead, ahead_bytes);
  });
}

void linear_packed(const LinearArgs& args, Pool& pool) {
  const int64_t n = args.n, k = args.k;
  const float* w = static_cast<const float*>(args.w);
  for (int64_t top = 0; top < args.m; top += kPassRows) {
    const int64_t m = args.m - top < kPassRows ? args.m - top : kPassRows;
    float* xs = thread_scratch<XTag>(m * k);
    unpack_rows<float>(args, top, m, xs, pool);

    const int64_t panels = n / kTileCols, panel_bytes = k * kTileCols * sizeof(float);
    int64_t chunk = panels / (kChunksPerThread * pool.num_threads());
    if (chunk > kPackedChunkBytes / panel_bytes) chunk = kPackedChunkBytes / panel_bytes;
    if (chunk < 1) chunk = 1;
    pool.parallel_for((panels + chunk - 1) / chunk, [&args, w, k, top, m, xs, panels, chunk](int64_t i) {
      float* sums = thread_scratch<SumTag>(m * kTileCols);
      const int64_t end = (i + 1) * chunk < panels ? (i + 1) * chunk : panels;
      for (int64_t p = i * chunk; p < end; ++p) {
        std::memset(sums, 0, m * kTileCols * sizeof(float));
        for (int64_t start = 0; start < k; start += kBlock) {
          const int64_t length = k - start < kBlock ? k - start : kBlock, steps = length / kLanes;
          const float* block = w + (p * k + start) * kTileCols;
          const float* x = xs + m * start;
          if (m <= kDirectRows) {
            for_each_row_tile(m, [&](int64_t row, int rows) {
              add_block(rows, x + row * steps, m * steps, block, steps, sums + row * kTileCols, row == 0 ? 64 : 0);
            });
            continue;
          }
          float* wide = thread_scratch<WideTag>(kBlockSteps * kTileCols);
          for (int64_t j = 0; j < kLanes; ++j) {
            widen(lane_of(block, j, steps), steps, wide);
            for_each_row_tile(m, [&](int64_t row, int rows) {
              add_wide_lane(rows, x + (j * m + row) * steps, wide, steps, sums + row * kTileCols,
                            after_lane(block, j, steps), row == 0 ? 64 : 0);
            });
          }
        }
        for (int64_t r = 0; r < m; ++r) write_sums(args, top + r, p * kTileCols, kTileCols, sums + r * kTileCols);
      }
    });
  }
}
