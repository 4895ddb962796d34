// y = x @ w^T in 16-bit fixed point, for bfloat16 and for int8 weights. Included after tile.h and sums.h.
//
// AVX2 multiplies and adds twice as many 16-bit integers in a cycle as floats, so both sides are whole numbers:
// bfloat16 w is scaled to +-kFixedW, channel by channel, when it is packed; int8 w comes with the scales of its
// groups; kFixedGroup elements of a row of x are scaled to +-kFixedX or, against int8, +-kFixedXForInt8 when they are
// read. A segment's products are summed as 32-bit integers, which is exact, and the sums of the segments as floats,
// one after the other. A scaled element is off by half a unit at most: of x 2^-13, against int8 2^-16, of the largest
// of its group; of w 2^-14 of the largest of its channel, where bfloat16 itself is off by up to 2^-9 of the element.
// int8 is taken as it is. A row's bits depend on that row and w alone.
//
// A matrix [n, k], n a multiple of kTileCols and k of kGroup, is cut into panels of kTileCols channels, and a panel
// into groups along k that share a scale in each channel: bfloat16 has one group, int8 any that fixed_group() takes. A
// group is kTileCols float scales, then [pair of elements][channel][element of the pair]. A segment is what lies in
// one group of w and in one of x.

constexpr int kFixedX = 4095, kFixedW = 8191, kFixedXForInt8 = 127 * 256;
static_assert(kFixedGroup * kFixedX * kFixedW < int64_t{1} << 31, "a group's sum must fit");
static_assert(kFixedGroup * kFixedXForInt8 * 128 < int64_t{1} << 31, "a group's sum must fit");
constexpr int64_t kFixedPassBytes = 4 << 20;     // of x, taken at once: bounds the scratch memory
constexpr int64_t kFixedChunkBytes = 256 << 10;  // of w: what a thread takes at a time, at most
constexpr int64_t kFixedAhead = 4 << 10;         // bytes of w between what is computed and what is asked for
constexpr int64_t kFixedBlock = 256;             // elements of k that a row tile takes at once, at most
// Up to so many rows read w strictly as it lies, and int8 as it is; more read a block of all panels
// before the next, so that their own blocks stay in L2, and int8 widened once for all.
constexpr int64_t kSequentialRows = 24;

struct ScaleTag {};

// The factor that brings numbers of at most `largest` to whole numbers of at most `limit`; 0 where there is none.
inline float to_fixed(float largest, int limit) {
  return largest > 1e-30f && largest <= std::numeric_limits<float>::max() ? static_cast<float>(limit) / largest : 0.0f;
}
// The larger magnitude; a NaN stays.
inline float larger(float largest, float value) {
  const float size = std::fabs(value);
  return size <= largest || largest != largest ? largest : size;
}

// Bytes of a group of a packed panel.
inline int64_t fixed_group_bytes(int64_t group, int64_t element) {
  return kTileCols * (static_cast<int64_t>(sizeof(float)) + group * element);
}

// One panel: kTileCols rows of w.
inline void pack_fixed_rows(const bf16* w, int64_t k, char* out) {
  float* const scales = reinterpret_cast<float*>(out);
  int16_t* to = reinterpret_cast<int16_t*>(scales + kTileCols);
  for (int c = 0; c < kTileCols; ++c, w += k, to += 2) {
    float largest = 0.0f;
    for (int64_t i = 0; i < k; ++i) largest = larger(largest, to_float(w[i]));
    const float factor = to_fixed(largest, kFixedW);
    scales[c] = largest / kFixedW;
    for (int64_t i = 0; i < k; ++i) {
      const float value = factor == 0.0f ? 0.0f : to_float(w[i]) * factor;
      to[i / 2 * 2 * kTileCols + i % 2] = static_cast<int16_t>(std::lrintf(value));
    }
  }
}
// kTileCols rows of w, `length` of their elements: kSide of each row side by side.
template <int kSide, typename T>
void interleave(const T* w, int64_t k, int64_t length, T* out) {
  for (int c = 0; c < kTileCols; ++c) {
    const T* const from = w + c * k;
    T* const to = out + c * kSide;
    for (int64_t i = 0; i < length; i += kSide) std::memcpy(to + i * kTileCols, from + i, kSide * sizeof(T));
  }
}
template <int kSide>
void pack_int8_rows(const int8_t* w, const float* scales, int64_t k, int64_t group, char* out) {
  for (int64_t start = 0; start < k; start += group, out += fixed_group_bytes(group, 1)) {
    for (int c = 0; c < kTileCols; ++c) {
      std::memcpy(out + c * sizeof(float), scales + (c * k + start) / group, sizeof(float));
    }
    interleave<kSide>(w + start, k, group, reinterpret_cast<int8_t*>(out + kTileCols * sizeof(float)));
  }
}

void pack_fixed(const PackArgs& args, Pool& pool) {
  const int64_t k = args.k, panel = k * kTileCols;  // elements
  char* const out = static_cast<char*>(args.out);
  pool.parallel_for(args.rows / kTileCols, [&args, out, k, panel](int64_t i) {
    if (args.dtype == Dtype::kBfloat16) {
      pack_fixed_rows(static_cast<const bf16*>(args.w) + i * panel, k, out + i * fixed_group_bytes(k, sizeof(int16_t)));
    } else {
      pack_int8_rows<2>(static_cast<const int8_t*>(args.w) + i * panel, args.scales + i * panel / args.group, k,
                        args.group, out + i * (k / args.group) * fixed_group_bytes(args.group, sizeof(int8_t)));
    }
  });
}

// Rows of x as integers.
struct FixedRows {
  int64_t m, k;     // rows that lie together, and their elements
  int64_t segment;  // elements
  int limit;        // what the largest of a group becomes
  int32_t* pairs;   // [segment][row tile][pair][row of the tile]
  float* scales;    // [segment][row]
};

// `length` elements of a row as whole numbers of at most `limit`. Returns what one of them is worth.
template <typename X>
float to_fixed_group(const X* x, int64_t length, int limit, int16_t* whole) {
  alignas(64) float values[kFixedGroup];
  vf low = zero(), high = zero();  // of all groups' largest, by NaN-keeping maxima
  for (int64_t i = 0; i < length; i += kLanes) {
    const vf v = load_row(x + i);
    store(values + i, v);
    low = max_or_nan(low, v);
    high = max_or_nan(high, sub(zero(), v));
  }
  alignas(64) float parts[2 * kLanes];
  store(parts, low);
  store(parts + kLanes, high);
  float largest = 0.0f;
  for (int i = 0; i < 2 * kLanes; ++i) largest = larger(largest, parts[i]);
  const vf factor = set1(to_fixed(largest, limit));
  for (int64_t i = 0; i < length; i += kLanes) store_fixed(whole + i, mul(load(values + i), factor));
  return largest / limit;
}

// Row r of a row tile that begins at row `first`.
template <typename X>
void quantise_row(const X* x, int64_t first, int rows, int r, const FixedRows& out) {
  const int64_t m = out.m, k = out.k;
  for (int64_t start = 0; start < k; start += kFixedGroup) {
    const int64_t length = k - start < kFixedGroup ? k - start : kFixedGroup;
    alignas(64) int16_t whole[kFixedGroup];
    const float scale = to_fixed_group(x + start, length, out.limit, whole);
    for (int64_t begin = 0; begin < length; begin += out.segment) {
      const int64_t part = length - begin < out.segment ? length - begin : out.segment;
      int32_t* to = out.pairs + (m * (start + begin) + first * part) / 2 + r;
      for (int64_t i = 0; i < part / 2; ++i) std::memcpy(to + i * rows, whole + begin + 2 * i, sizeof(int32_t));
      out.scales[(start + begin) / out.segment * m + first + r] = scale;
    }
  }
}

// Segments of one length that lie at equal distances, of a row tile and of a panel, and the sums that they add to.
struct FixedRun {
  int64_t segments, steps;  // steps: pairs of elements of a segment
  const int32_t* x;         // [segment: x_stride apart][pair][row]
  int64_t x_stride;
  const float* x_scales;    // [segment: x_scale_stride apart][row]
  int64_t x_scale_stride;
  const char* w;            // [segment: w_stride bytes apart][pair][channel][element of the pair]
  int64_t w_stride;
  const char* w_scales;     // [segment: w_scale_stride bytes apart][channel]
  int64_t w_scale_stride;
  float* sums;              // [row][channel]
};

// sums += for one segment after the other: scale of the row * scale of the channel * the sum of their products. With
// kFetch, memory is asked on the way for what follows in w. Not inlined, and its loop not unrolled: inside a larger
// function, or a loop with a part peeled off, GCC runs out of registers.
template <int kRows, typename W, bool kFetch>
__attribute__((noinline)) void fixed_tile(const FixedRun& run) {
  constexpr int kChains = fixed_chains(kRows), kUnrolled = kChains < 2 ? 2 : kChains;
  float* const sums = run.sums;
  for (int64_t i = 0; i < run.segments; ++i) {
    vi acc[kChains][kRows][kTileVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) acc[c][r][v] = vi{};
      }
    }
    const int32_t* x = run.x + i * run.x_stride;
    const char* w = run.w + i * run.w_stride;
#pragma GCC unroll 1
    for (int64_t s = run.steps; s > 0; s -= kUnrolled) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnrolled; ++u) {
        if (kFetch && (u % 2 == 0 || sizeof(W) == 2)) __builtin_prefetch(w + kFixedAhead, 0, 2);
        vi b[kTileVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) b[v] = load_pairs(reinterpret_cast<const W*>(w) + v * 2 * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) add_pairs(x + r, b, acc[u % kChains][r]);
        x += kRows;
        w += 2 * kTileCols * sizeof(W);
      }
    }
    const float* const x_scales = run.x_scales + i * run.x_scale_stride;
    const char* const w_scales = run.w_scales + i * run.w_scale_stride;
    if (kFetch) __builtin_prefetch(w_scales + kFixedAhead, 0, 2);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const vf scale = set1(x_scales[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) acc[0][r][v] = add_whole(acc[0][r][v], acc[c][r][v]);
        float* const out = sums + r * kTileCols + v * kLanes;
        const vf factor = mul(scale, load(reinterpret_cast<const float*>(w_scales) + v * kLanes));
        store(out, fma(to_floats(acc[0][r][v]), factor, load(out)));
      }
    }
  }
}

template <typename W, bool kFetch>
inline void add_fixed(int rows, const FixedRun& run) {
  with_rows<kFixedRows>(rows, [&](auto count) { fixed_tile<count, W, kFetch>(run); });
}

// fn(tile, its first row, its rows) for each of `tiles` nearly equal tiles of m rows of x, by several threads if there
// is much to do.
template <typename Fn>
void for_each_tile_of_x(int64_t m, int64_t tiles, int64_t k, Pool& pool, const Fn& fn) {
  const auto run = [&fn, m, tiles](int64_t i) {
    const int64_t first = m * i / tiles;
    fn(i, first, static_cast<int>(m * (i + 1) / tiles - first));
  };
  if (m * k < kThreadedUnpack) {
    for (int64_t i = 0; i < tiles; ++i) run(i);
  } else {
    pool.parallel_for(tiles, run);
  }
}
// fn(x from an element on).
template <typename Fn>
void with_x(const LinearArgs& args, int64_t from, const Fn& fn) {
  if (args.x_dtype == Dtype::kBfloat16) {
    fn(static_cast<const bf16*>(args.x) + from);
  } else {
    fn(static_cast<const float*>(args.x) + from);
  }
}

// Segments of a panel that fixed_tile() takes at once.
struct FixedBlock {
  int64_t start;               // element of the panel
  int64_t segments, length;    // length: elements of a segment
  int64_t w, w_stride;         // bytes from the panel's begin, and from one segment to the next
  int64_t scales, scale_stride;
};

inline std::vector<FixedBlock> fixed_blocks(int64_t k, int64_t group, int64_t segment, int64_t element) {
  std::vector<FixedBlock> blocks;
  const int64_t group_bytes = fixed_group_bytes(group, element), scale_bytes = kTileCols * sizeof(float);
  for (int64_t start = 0; start < k;) {
    FixedBlock block = {start, 0, segment};
    block.scales = start / group * group_bytes;
    block.w = block.scales + scale_bytes + start % group * kTileCols * element;
    int64_t left = k - start;  // that lies at equal distances
    if (group > segment) {
      left = group - start % group;
      block.w_stride = segment * kTileCols * element;
      block.scale_stride = 0;
    } else {
      block.w_stride = block.scale_stride = group_bytes;
    }
    if (left < segment) block.length = left;
    block.segments = (left < kFixedBlock ? left : kFixedBlock) / block.length;
    start += block.segments * block.length;
    blocks.push_back(block);
  }
  return blocks;
}

// A block of a panel against all rows of x.
template <typename W>
void add_fixed_block(const char* panel, const FixedBlock& block, const FixedRows& xs, float* sums) {
  const int64_t m = xs.m, pairs = block.length / 2;
  FixedRun run = {};
  run.segments = block.segments;
  run.steps = pairs;
  run.x_stride = m * pairs;
  run.x_scale_stride = m;
  run.w = panel + block.w;
  run.w_stride = block.w_stride;
  run.w_scales = panel + block.scales;
  run.w_scale_stride = block.scale_stride;
  const auto move_to = [&](int64_t row) {
    run.x = xs.pairs + m * block.start / 2 + row * pairs;
    run.x_scales = xs.scales + block.start / xs.segment * m + row;
    run.sums = sums + row * kTileCols;
  };
  if (sizeof(W) == 2 || m <= kSequentialRows) {
    return for_each_row_tile<kFixedRows>(m, [&](int64_t row, int rows) {
      move_to(row);
      row == 0 ? add_fixed<W, true>(rows, run) : add_fixed<W, false>(rows, run);
    });
  }
  alignas(64) int16_t wide[kFixedBlock * kTileCols];
  int16_t* to = wide;
  for (int64_t i = 0; i < block.segments; ++i) {
    const W* from = reinterpret_cast<const W*>(run.w + i * run.w_stride);
    for (int64_t s = 0; s < pairs; ++s, from += 2 * kTileCols, to += 2 * kTileCols) {
      if (s % 2 == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + kFixedAhead, 0, 2);
      for (int v = 0; v < kTileVectors; ++v) store_pairs(to + v * 2 * kLanes, load_pairs(from + v * 2 * kLanes));
    }
  }
  run.w = reinterpret_cast<const char*>(wide);
  run.w_stride = pairs * 2 * kTileCols * sizeof(int16_t);
  for_each_row_tile<kFixedRows>(m, [&](int64_t row, int rows) {
    move_to(row);
    add_fixed<int16_t, false>(rows, run);
  });
}

// fn(first row, rows) for passes over x that need little memory.
template <typename Fn>
void for_each_pass(const LinearArgs& args, const Fn& fn) {
  int64_t pass = kFixedPassBytes / (2 * args.k) / kFixedRows * kFixedRows;
  if (pass < 8 * kFixedRows) pass = 8 * kFixedRows;
  for (int64_t top = 0; top < args.m; top += pass) fn(top, args.m - top < pass ? args.m - top : pass);
}

// fn(the first panel, its number, how many) for what a thread takes at a time.
template <typename Fn>
void for_each_chunk(const LinearArgs& args, int64_t panel, Pool& pool, const Fn& fn) {
  const char* const w = static_cast<const char*>(args.w);
  const int64_t panels = args.n / kTileCols;
  int64_t chunk = panels / (kChunksPerThread * pool.num_threads());
  if (chunk > kFixedChunkBytes / panel) chunk = kFixedChunkBytes / panel;
  if (chunk < 1) chunk = 1;
  pool.parallel_for((panels + chunk - 1) / chunk, [=, &fn](int64_t i) {
    const int64_t first = i * chunk;
    fn(w + first * panel, first, panels - first < chunk ? panels - first : chunk);
  });
}

// add(panel, block) for all blocks of `count` panels.
template <typename Fn>
void in_order(int64_t m, const std::vector<FixedBlock>& blocks, int64_t count, const Fn& add) {
  if (m <= kSequentialRows) {
    for (int64_t p = 0; p < count; ++p) {
      for (const FixedBlock& block : blocks) add(p, block);
    }
  } else {  // a block of all rows of x stays in L2 for all panels
    for (const FixedBlock& block : blocks) {
      for (int64_t p = 0; p < count; ++p) add(p, block);
    }
  }
}

// sums [panel][row][channel] to y, row by row: what is next to each other in memory is written at once.
inline void write_panels(const LinearArgs& args, int64_t top, int64_t m, int64_t first, int64_t count,
                         const float* sums) {
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t p = 0; p < count; ++p) {
      write_sums(args, top + r, (first + p) * kTileCols, kTileCols, sums + (p * m + r) * kTileCols);
    }
  }
}

template <typename W>
void linear_fixed_pass(const LinearArgs& args, int64_t top, int64_t m, Pool& pool) {
  const int64_t k = args.k, group = args.group, panel = k / group * fixed_group_bytes(group, sizeof(W));
  const int64_t segment = group < kFixedGroup ? group : kFixedGroup, segments = (k + segment - 1) / segment;
  const std::vector<FixedBlock> blocks = fixed_blocks(k, group, segment, sizeof(W));
  const FixedRows xs = {m, k, segment, sizeof(W) == 1 ? kFixedXForInt8 : kFixedX,
                        reinterpret_cast<int32_t*>(thread_scratch<XTag>(m * k / 2)),
                        thread_scratch<ScaleTag>(m * segments)};
  for_each_tile_of_x(m, (m + kFixedRows - 1) / kFixedRows, k, pool, [&](int64_t, int64_t first, int rows) {
    with_x(args, (top + first) * k, [&](const auto* x) {
      for (int r = 0; r < rows; ++r) quantise_row(x + r * k, first, rows, r, xs);
    });
  });
  for_each_chunk(args, panel, pool, [=, &args, &blocks, &xs](const char* w, int64_t first, int64_t count) {
    float* const sums = thread_scratch<SumTag>(count * m * kTileCols);
    std::memset(sums, 0, count * m * kTileCols * sizeof(float));
    in_order(m, blocks, count, [&](int64_t p, const FixedBlock& block) {
      add_fixed_block<W>(w + p * panel, block, xs, sums + p * m * kTileCols);
    });
    write_panels(args, top, m, first, count, sums);
  });
}

void linear_fixed(const LinearArgs& args, Pool& pool) {
  for_each_pass(args, [&](int64_t top, int64_t m) {
    args.w_dtype == Dtype::kInt16 ? linear_fixed_pass<int16_t>(args, top, m, pool)
                                  : linear_fixed_pass<int8_t>(args, top, m, pool);
  });
}
