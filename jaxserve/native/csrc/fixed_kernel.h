// y = x @ w^T in 16-bit fixed point, for bfloat16 weights. Included after linear_kernel.h.
//
// AVX2 multiplies and adds twice as many 16-bit integers in a cycle as floats, so both sides are scaled to whole
// numbers: a channel of w to +-kFixedW when it is packed, kFixedGroup elements of a row of x to +-kFixedX when
// it is read. A group's products are summed as 32-bit integers, which is exact, and the sums of the groups as
// floats, one after the other. An element is off by half a unit at most, 2^-13 of the largest of its group in x
// and 2^-14 of the largest of its channel in w; bfloat16 itself is off by up to 2^-9 of the element. A row's bits
// depend on that row and w alone.
//
// A matrix [n, k], n a multiple of kTileCols and k of kGroup, is cut into panels of kTileCols channels. A panel
// is kTileCols float scales, then [pair of elements][channel][element of the pair]: k + 2 integers a channel.

constexpr int64_t kFixedGroup = 64;
constexpr int kFixedX = 4095, kFixedW = 8191;
static_assert(kFixedGroup * kFixedX * kFixedW < int64_t{1} << 31, "a group's sum must fit");
constexpr int64_t kFixedScaleWords = 2;          // int16 words that a channel's scale takes
constexpr int64_t kFixedPassBytes = 4 << 20;     // of x, taken at once: bounds the scratch memory
constexpr int64_t kFixedChunkBytes = 256 << 10;  // of w: what a thread takes at a time, at most
constexpr int64_t kFixedAhead = 4 << 10;         // bytes of w between what is computed and what is asked for

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

// One panel: kTileCols rows of w.
inline void pack_fixed_rows(const bf16* w, int64_t k, int16_t* out) {
  for (int c = 0; c < kTileCols; ++c, w += k) {
    float largest = 0.0f;
    for (int64_t i = 0; i < k; ++i) largest = larger(largest, to_float(w[i]));
    const float scale = largest / kFixedW, factor = to_fixed(largest, kFixedW);
    std::memcpy(out + c * kFixedScaleWords, &scale, sizeof scale);
    int16_t* to = out + kTileCols * kFixedScaleWords + 2 * c;
    for (int64_t i = 0; i < k; i += 2, to += 2 * kTileCols) {
      for (int64_t o = 0; o < 2; ++o) {
        to[o] = factor == 0.0f ? 0 : static_cast<int16_t>(std::lrintf(to_float(w[i + o]) * factor));
      }
    }
  }
}

// Row r of a row tile of x as pairs of integers, [group][row tile][pair][row of the tile], and its groups' scales,
// [group][row]. `m` rows lie together.
template <typename X>
void quantise_row(const X* x, int64_t m, int64_t k, int64_t first, int rows, int r, int32_t* out, float* scales) {
  for (int64_t start = 0; start < k; start += kFixedGroup) {
    const int64_t length = k - start < kFixedGroup ? k - start : kFixedGroup;
    alignas(64) float values[kFixedGroup];
    vf low = zero(), high = zero();  // of all groups' largest, by NaN-keeping maxima
    for (int64_t i = 0; i < length; i += kLanes) {
      const vf v = load_row(x + start + i);
      store(values + i, v);
      low = max_or_nan(low, v);
      high = max_or_nan(high, sub(zero(), v));
    }
    alignas(64) float parts[2 * kLanes];
    store(parts, low);
    store(parts + kLanes, high);
    float largest = 0.0f;
    for (int i = 0; i < 2 * kLanes; ++i) largest = larger(largest, parts[i]);
    scales[start / kFixedGroup * m + first + r] = largest / kFixedX;
    const vf factor = set1(to_fixed(largest, kFixedX));
    alignas(64) int32_t pairs[kFixedGroup / 2];
    for (int64_t i = 0; i < length; i += 2 * kLanes) {
      store_fixed(pairs + i / 2, mul(load(values + i), factor), mul(load(values + i + kLanes), factor));
    }
    int32_t* to = out + (m * start + first * length) / 2 + r;
    for (int64_t i = 0; i < length / 2; ++i) to[i * rows] = pairs[i];
  }
}

// sums[r, :] += scale of row r * (a group of rows x) * (a group of a panel), `steps` pairs of elements. On the way
// the lines at `ahead` are asked for, one a step. Not inlined: inside a larger function GCC runs out of registers.
template <int kRows>
__attribute__((noinline)) void fixed_tile(const int32_t* x, const int16_t* w, int64_t steps, const float* scales,
                                          float* sums, const char* ahead, int64_t ahead_bytes) {
  vi acc[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = vi{};
  for (int64_t s = 0; s < steps; s += 2) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __builtin_prefetch(ahead, 0, 2);
      const vi b0 = load_pairs(w), b1 = load_pairs(w + 2 * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) add_pairs(x + r, b0, b1, acc[r][0], acc[r][1]);
      x += kRows;
      w += 2 * kTileCols;
      ahead += ahead_bytes;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const vf scale = set1(scales[r]);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      float* out = sums + r * kTileCols + v * kLanes;
      store(out, fma(to_floats(acc[r][v]), scale, load(out)));
    }
  }
}

inline void add_fixed(int rows, const int32_t* x, const int16_t* w, int64_t steps, const float* scales, float* sums,
                      const char* ahead, int64_t ahead_bytes) {
  switch (rows) {
    case 1: return fixed_tile<1>(x, w, steps, scales, sums, ahead, ahead_bytes);
    case 2: return fixed_tile<2>(x, w, steps, scales, sums, ahead, ahead_bytes);
    case 3: return fixed_tile<3>(x, w, steps, scales, sums, ahead, ahead_bytes);
    case 4: return fixed_tile<4>(x, w, steps, scales, sums, ahead, ahead_bytes);
    case 5: return fixed_tile<5>(x, w, steps, scales, sums, ahead, ahead_bytes);
    case 6: return fixed_tile<6>(x, w, steps, scales, sums, ahead, ahead_bytes);
  }
}

// Rows [top, top + m) of x as integers.
inline void quantise_rows(const LinearArgs& args, int64_t top, int64_t m, int32_t* out, float* scales, Pool& pool) {
  const int64_t k = args.k, tiles = (m + kTileRows - 1) / kTileRows;
  const auto quantise = [&args, top, m, tiles, k, out, scales](int64_t i) {
    const int64_t first = m * i / tiles;
    const int rows = static_cast<int>(m * (i + 1) / tiles - first);
    for (int r = 0; r < rows; ++r) {
      const int64_t from = (top + first + r) * k;
      if (args.x_dtype == Dtype::kBfloat16) {
        quantise_row(static_cast<const bf16*>(args.x) + from, m, k, first, rows, r, out, scales);
      } else {
        quantise_row(static_cast<const float*>(args.x) + from, m, k, first, rows, r, out, scales);
      }
    }
  };
  if (m * k < kThreadedUnpack) {
    for (int64_t i = 0; i < tiles; ++i) quantise(i);
  } else {
    pool.parallel_for(tiles, quantise);
  }
}

void linear_fixed(const LinearArgs& args, Pool& pool) {
  const int64_t k = args.k, panel = (k + kFixedScaleWords) * kTileCols;  // words
  const int16_t* w = static_cast<const int16_t*>(args.w);
  const int64_t groups = (k + kFixedGroup - 1) / kFixedGroup, panels = args.n / kTileCols;
  int64_t pass = kFixedPassBytes / (2 * k) / kTileRows * kTileRows;
  if (pass < 8 * kTileRows) pass = 8 * kTileRows;
  for (int64_t top = 0; top < args.m; top += pass) {
    const int64_t m = args.m - top < pass ? args.m - top : pass;
    int32_t* xs = reinterpret_cast<int32_t*>(thread_scratch<XTag>(m * k / 2));
    float* scales = thread_scratch<ScaleTag>(m * groups);
    quantise_rows(args, top, m, xs, scales, pool);

    int64_t chunk = panels / (kChunksPerThread * pool.num_threads());
    if (chunk > kFixedChunkBytes / (2 * panel)) chunk = kFixedChunkBytes / (2 * panel);
    if (chunk < 1) chunk = 1;
    pool.parallel_for((panels + chunk - 1) / chunk, [&args, w, k, panel, top, m, xs, scales, panels, chunk](int64_t i) {
      float* const all_sums = thread_scratch<SumTag>(chunk * m * kTileCols);
      const int64_t first = i * chunk, count = panels - first < chunk ? panels - first : chunk;
      std::memset(all_sums, 0, count * m * kTileCols * sizeof(float));
      // A group of all rows of x stays in L2 for all panels.
      for (int64_t start = 0; start < k; start += kFixedGroup) {
        const int64_t length = k - start < kFixedGroup ? k - start : kFixedGroup;
        for (int64_t p = 0; p < count; ++p) {
          const int16_t* const block = w + (first + p) * panel + (kFixedScaleWords + start) * kTileCols;
          float* const sums = all_sums + p * m * kTileCols;
          for_each_row_tile(m, [&](int64_t row, int rows) {
            add_fixed(rows, xs + (m * start + row * length) / 2, block, length / 2,
                      scales + start / kFixedGroup * m + row, sums + row * kTileCols,
                      reinterpret_cast<const char*>(block) + kFixedAhead, row == 0 ? 64 : 0);
          });
        }
      }
      for (int64_t p = 0; p < count; ++p) {
        float* const sums = all_sums + p * m * kTileCols;
        float factors[kTileCols];
        std::memcpy(factors, w + (first + p) * panel, sizeof factors);
        const vf f0 = load(factors), f1 = load(factors + kLanes);
        for (int64_t r = 0; r < m; ++r) {
          float* sum = sums + r * kTileCols;
          store(sum, mul(load(sum), f0));
          store(sum + kLanes, mul(load(sum + kLanes), f1));
          write_sums(args, top + r, (first + p) * kTileCols, kTileCols, sum);
        }
      }
    });
  }
}
