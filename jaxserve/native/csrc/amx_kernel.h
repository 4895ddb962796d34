// y = x @ w^T on AMX, for bfloat16 and for int8 weights. Included after fixed_kernel.h, whose panels it reads: those of
// bfloat16 hold the elements themselves, those of int8 four elements of a channel side by side.
//
// int8: x is what fixed_kernel.h makes of it, each whole number as two of 8 bits, 256 * high + low. Sums of a segment
// are exact and are added in the same order by the same operations: the bits are fixed_kernel.h's.
// bfloat16: products are exact, and a channel's sum is one chain of float32 additions along k, two products a link;
// float32 rows of x are split into two bfloat16, which leaves 16 bits of them. A row's bits depend on it and w alone.

// Tile registers: sums are in 0 to 3, x in 4 and 5, w in 6 and 7. The compiler knows nothing of them.
#define JAXSERVE_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define JAXSERVE_TILE_STORE(to, stride, tile) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
#define JAXSERVE_TILE_MULTIPLY(what, sum, x, w) asm volatile("tdp" #what " %%tmm" #w ", %%tmm" #x ", %%tmm" #sum : :)

constexpr int64_t kAmxRows = 16;         // of a tile
constexpr int64_t kAmxBytes = 64;        // of a row of a tile
constexpr int64_t kAmxTile = kAmxRows * kAmxBytes;
constexpr int kAmxInt8Rows = 8;          // of x in a tile: both halves of each
constexpr int64_t kAmxBlock = 512;       // elements of k that many rows take of all panels before the next

// The tile registers' shapes, for as long as a thread works on a chunk.
class TileShapes {
 public:
  // x: x_rows rows of x_bytes, w: x_bytes / 4 rows of 64, sums: x_rows rows of 64.
  TileShapes(int64_t x_rows, int64_t x_bytes) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes = {1};
    for (int t = 0; t < 8; ++t) {
      shapes.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? x_bytes : kAmxBytes);
      shapes.rows[t] = static_cast<uint8_t>(t < 6 ? x_rows : x_bytes / 4);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~TileShapes() { asm volatile("tilerelease" : :); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
};

// Asks the memory for what follows in w.
inline void ask_ahead(const char* w, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(w + kFixedAhead + i, 0, 2);
}

// ---- int8 ----

// Rows of x as two terms of 8 bits.
struct TermRows {
  int64_t m, k, tiles;
  int64_t segment;  // elements; the last one of a row is filled up with zeros
  int8_t* terms;    // [segment][row tile][row of the tile][high, low][element]
  float* scales;    // [segment][row]
};

template <typename X>
void split_row(const X* x, int64_t first, int r, int64_t tile, const TermRows& out) {
  for (int64_t start = 0; start < out.k; start += kFixedGroup) {
    const int64_t length = out.k - start < kFixedGroup ? out.k - start : kFixedGroup;
    alignas(64) int16_t whole[kFixedGroup] = {};
    const float scale = to_fixed_group(x + start, length, kFixedXForInt8, whole);
    for (int64_t begin = 0; begin < length; begin += out.segment) {
      const int64_t segment = (start + begin) / out.segment;
      int8_t* high = out.terms + ((segment * out.tiles + tile) * kAmxRows + 2 * r) * out.segment;
      for (int64_t i = 0; i < out.segment; i += 32, high += 32) {
        const __m512i v = _mm512_load_si512(whole + begin + i);
        const __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(v, _mm512_set1_epi16(128)), 8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi16_epi8(upper));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + out.segment), _mm512_cvtepi16_epi8(v));
      }
      out.scales[segment * out.m + first + r] = scale;
    }
  }
}

// sums += what fixed_tile() adds. run.x: [segment: x_stride bytes apart][row][high, low][element].
template <int kRows, bool kFetch>
__attribute__((noinline)) void amx_int8_tile(const FixedRun& from) {
  alignas(64) static constexpr int32_t kZeros[kAmxTile / 4] = {};
  alignas(64) int32_t products[2][kAmxTile / 4];
  const FixedRun run = from;  // in registers, which the statements that write memory leave alone
  const int64_t segment = 2 * run.steps;
  const char* const x = reinterpret_cast<const char*>(run.x);
  vf sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = load(run.sums + r * kTileCols);
  const auto add_segment = [&](int64_t i) __attribute__((always_inline)) {
    const int32_t* const product = products[i % 2];
    const vf w_scales = load(reinterpret_cast<const float*>(run.w_scales + i * run.w_scale_stride));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const vi high = _mm512_load_si512(product + 2 * r * kTileCols);
      const vi low = _mm512_load_si512(product + (2 * r + 1) * kTileCols);
      const vi whole = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
      sums[r] = fma(to_floats(whole), mul(set1(run.x_scales[i * run.x_scale_stride + r]), w_scales), sums[r]);
    }
  };
  for (int64_t i = 0; i < run.segments; ++i) {
    const char* const w = run.w + i * run.w_stride;
    JAXSERVE_TILE_LOAD(0, kZeros, kAmxBytes);  // unlike tilezero, it waits for nothing
    JAXSERVE_TILE_LOAD(4, x + i * run.x_stride, segment);
    JAXSERVE_TILE_LOAD(6, w, kAmxBytes);
    JAXSERVE_TILE_MULTIPLY(bssd, 0, 4, 6);
    if (kFetch) ask_ahead(w, segment * kTileCols + 64);
    if (i > 0) add_segment(i - 1);  // while the tiles of this one are multiplied
    JAXSERVE_TILE_STORE(products[i % 2], kAmxBytes, 0);
  }
  add_segment(run.segments - 1);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store(run.sums + r * kTileCols, sums[r]);
}

// A block of a panel against all rows of x.
inline void add_amx_block(const char* panel, const FixedBlock& block, const TermRows& xs, float* sums) {
  FixedRun run = {};
  run.segments = block.segments;
  run.steps = xs.segment / 2;
  run.x_stride = xs.tiles * kAmxRows * xs.segment;
  run.x_scale_stride = xs.m;
  run.w = panel + block.w;
  run.w_stride = block.w_stride;
  run.w_scales = panel + block.scales;
  run.w_scale_stride = block.scale_stride;
  alignas(64) char whole[kAmxTile];
  if (block.length < xs.segment) {  // the last one, alone: what follows it is not of this panel
    std::memset(whole, 0, sizeof whole);
    std::memcpy(whole, run.w, block.length * kTileCols);
    run.w = whole;
  }
  const int8_t* x = xs.terms + block.start / xs.segment * run.x_stride;
  for_each_row_tile<kAmxInt8Rows>(xs.m, [&](int64_t row, int rows) {
    run.x = reinterpret_cast<const int32_t*>(x);
    run.x_scales = xs.scales + block.start / xs.segment * xs.m + row;
    run.sums = sums + row * kTileCols;
    with_rows<kAmxInt8Rows>(rows, [&](auto count) {
      row == 0 ? amx_int8_tile<count, true>(run) : amx_int8_tile<count, false>(run);
    });
    x += kAmxRows * xs.segment;
  });
}

inline void linear_amx_int8(const LinearArgs& args, int64_t top, int64_t m, Pool& pool) {
  const int64_t k = args.k, segment = args.group == kFixedGroup / 2 ? args.group : kFixedGroup;
  const int64_t tiles = (m + kAmxInt8Rows - 1) / kAmxInt8Rows, segments = (k + segment - 1) / segment;
  float* const memory = thread_scratch<XTag>(segments * tiles * kAmxRows * segment / sizeof(float));
  const TermRows xs = {m, k, tiles, segment, reinterpret_cast<int8_t*>(memory), thread_scratch<ScaleTag>(m * segments)};
  for_each_tile_of_x(m, tiles, k, pool, [&args, &xs, top, k](int64_t tile, int64_t first, int rows) {
    with_x(args, (top + first) * k, [&](const auto* x) {
      for (int r = 0; r < rows; ++r) split_row(x + r * k, first, r, tile, xs);
    });
  });
  const std::vector<FixedBlock> blocks = fixed_blocks(k, args.group, segment, sizeof(int8_t));
  const int64_t panel = k / args.group * fixed_group_bytes(args.group, sizeof(int8_t));
  for_each_chunk(args, panel, pool, [=, &args, &blocks, &xs](const char* w, int64_t first, int64_t count) {
    const TileShapes shapes(2 * ((m + tiles - 1) / tiles), segment);
    float* const sums = thread_scratch<SumTag>(count * m * kTileCols);
    std::memset(sums, 0, count * m * kTileCols * sizeof(float));
    in_order(m, blocks, count, [&](int64_t p, const FixedBlock& block) {
      add_amx_block(w + p * panel, block, xs, sums + p * m * kTileCols);
    });
    write_panels(args, top, m, first, count, sums);
  });
}

// ---- bfloat16 ----

// sums [panel][row tile][16][16] += the products of kTiles row tiles and kPanels panels over `steps` tiles along k.
template <int kTiles, int kPanels, bool kFetch>
__attribute__((noinline)) void amx_bf16_tiles(const char* x, int64_t x_stride, const char* w, int64_t panel,
                                              int64_t steps, float* sums, int64_t panel_sums) {
  constexpr int64_t kSums = kAmxTile / sizeof(float);
  JAXSERVE_TILE_LOAD(0, sums, kAmxBytes);
  if constexpr (kTiles > 1) JAXSERVE_TILE_LOAD(1, sums + kSums, kAmxBytes);
  if constexpr (kPanels > 1) JAXSERVE_TILE_LOAD(2, sums + panel_sums, kAmxBytes);
  if constexpr (kTiles > 1 && kPanels > 1) JAXSERVE_TILE_LOAD(3, sums + panel_sums + kSums, kAmxBytes);
  for (int64_t s = 0; s < steps; ++s, x += x_stride, w += kAmxTile) {
    JAXSERVE_TILE_LOAD(6, w, kAmxBytes);
    JAXSERVE_TILE_LOAD(4, x, kAmxBytes);
    if (kFetch) ask_ahead(w, kAmxTile);
    JAXSERVE_TILE_MULTIPLY(bf16ps, 0, 4, 6);
    if constexpr (kTiles > 1) {
      JAXSERVE_TILE_LOAD(5, x + kAmxTile, kAmxBytes);
      JAXSERVE_TILE_MULTIPLY(bf16ps, 1, 5, 6);
    }
    if constexpr (kPanels > 1) {
      JAXSERVE_TILE_LOAD(7, w + panel, kAmxBytes);
      if (kFetch) ask_ahead(w + panel, kAmxTile);
      JAXSERVE_TILE_MULTIPLY(bf16ps, 2, 4, 7);
    }
    if constexpr (kTiles > 1 && kPanels > 1) JAXSERVE_TILE_MULTIPLY(bf16ps, 3, 5, 7);
  }
  JAXSERVE_TILE_STORE(sums, kAmxBytes, 0);
  if constexpr (kTiles > 1) JAXSERVE_TILE_STORE(sums + kSums, kAmxBytes, 1);
  if constexpr (kPanels > 1) JAXSERVE_TILE_STORE(sums + panel_sums, kAmxBytes, 2);
  if constexpr (kTiles > 1 && kPanels > 1) JAXSERVE_TILE_STORE(sums + panel_sums + kSums, kAmxBytes, 3);
}

// Rows of x in tiles: [tile along k][row tile][row][element], zeros behind k. `terms`: rows of a tile for a row of x.
struct TiledRows {
  int64_t m, k, tiles, terms;
  char* x;
};

inline void store_terms(const bf16* x, int64_t count, char* to) { std::memcpy(to, x, count * sizeof(bf16)); }
inline void store_terms(const float* x, int64_t count, char* to) {
  bf16 high[kAmxBytes / 2], low[kAmxBytes / 2];
  for (int64_t i = 0; i < count; ++i) {
    from_float(x[i], high + i);
    from_float(x[i] - to_float(high[i]), low + i);
  }
  std::memcpy(to, high, count * sizeof(bf16));
  std::memcpy(to + kAmxBytes, low, count * sizeof(bf16));
}

// `count` panels from w on, tiles along k [begin, end), which lie whole in w, against all rows.
inline void add_amx_panels(const char* w, int64_t panel, int64_t count, int64_t begin, int64_t end, const TiledRows& xs,
                           float* sums) {
  const int64_t panel_sums = xs.tiles * kAmxTile / sizeof(float), x_stride = xs.tiles * kAmxTile;
  const int64_t side = xs.tiles <= 2 ? 1 : 2;  // few rows read w strictly as it lies
  for (int64_t p = 0; p < count; p += side) {
    for (int64_t t = 0; t < xs.tiles; t += 2) {
      const auto add = [&](auto tiles, auto panels, auto fetch) {
        amx_bf16_tiles<tiles, panels, fetch>(xs.x + begin * x_stride + t * kAmxTile, x_stride,
                                             w + p * panel + begin * kAmxTile, panel, end - begin,
                                             sums + p * panel_sums + t * kAmxTile / sizeof(float), panel_sums);
      };
      const auto add_fetching = [&](auto tiles, auto panels) {
        t == 0 ? add(tiles, panels, std::true_type()) : add(tiles, panels, std::false_type());
      };
      const std::integral_constant<int, 1> one;
      const std::integral_constant<int, 2> two;
      const bool pair = side == 2 && p + 1 < count;
      if (t + 1 < xs.tiles) {
        pair ? add_fetching(two, two) : add_fetching(two, one);
      } else {
        pair ? add_fetching(one, two) : add_fetching(one, one);
      }
    }
  }
}

inline void linear_amx_bf16(const LinearArgs& args, int64_t top, int64_t m, Pool& pool) {
  const int64_t k = args.k, terms = args.x_dtype == Dtype::kBfloat16 ? 1 : 2, rows = kAmxRows / terms;
  const int64_t tiles = (m + rows - 1) / rows, full = k / 32, steps = (k + 31) / 32;
  const TiledRows xs = {m, k, tiles, terms,
                        reinterpret_cast<char*>(thread_scratch<XTag>(steps * tiles * kAmxTile / sizeof(float)))};
  for_each_tile_of_x(m, tiles, k, pool, [&](int64_t tile, int64_t first, int count) {
    with_x(args, (top + first) * k, [&](const auto* x) {
      for (int64_t s = 0; s < steps; ++s) {
        char* const to = xs.x + (s * tiles + tile) * kAmxTile;
        if (s == full) std::memset(to, 0, kAmxTile);
        const int64_t length = s == full ? k - 32 * full : 32;
        for (int r = 0; r < count; ++r) store_terms(x + r * k + 32 * s, length, to + r * terms * kAmxBytes);
      }
    });
  });
  const int64_t panel = fixed_group_bytes(k, sizeof(bf16)), head = kTileCols * sizeof(float);
  for_each_chunk(args, panel, pool, [=, &args, &xs](const char* w, int64_t first, int64_t count) {
    const TileShapes shapes(kAmxRows, kAmxBytes);
    const int64_t panel_sums = tiles * kAmxTile / sizeof(float);
    float* const sums = thread_scratch<SumTag>(count * panel_sums);
    std::memset(sums, 0, count * panel_sums * sizeof(float));
    const int64_t block = m <= kSequentialRows ? steps : kAmxBlock / 32;
    for (int64_t begin = 0; begin < full; begin += block) {
      const int64_t end = begin + block < full ? begin + block : full;
      add_amx_panels(w + head, panel, count, begin, end, xs, sums);
    }
    for (int64_t p = 0; full < steps && p < count; ++p) {
      alignas(64) char last[kAmxTile] = {};
      std::memcpy(last, w + p * panel + head + full * kAmxTile, (k - 32 * full) * kTileCols * sizeof(bf16));
      TiledRows rest = xs;
      rest.x += full * tiles * kAmxTile;
      add_amx_panels(last, 0, 1, 0, 1, rest, sums + p * panel_sums);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = m * t / tiles, end = m * (t + 1) / tiles;
      for (int64_t r = row; r < end; ++r) {
        for (int64_t p = 0; p < count; ++p) {
          float* const sum = sums + p * panel_sums + (t * kAmxRows + (r - row) * terms) * kTileCols;
          if (terms == 2) store(sum, add(load(sum), load(sum + kTileCols)));
          write_sums(args, top + r, (first + p) * kTileCols, kTileCols, sum);
        }
      }
    }
  });
}

// ---- both ----

void linear_amx(const LinearArgs& args, Pool& pool) {
  for_each_pass(args, [&](int64_t top, int64_t m) {
    args.w_dtype == Dtype::kInt16 ? linear_amx_bf16(args, top, m, pool) : linear_amx_int8(args, top, m, pool);
  });
}

void pack_amx(const PackArgs& args, Pool& pool) {
  const int64_t k = args.k, panel = k * kTileCols;  // elements
  char* const out = static_cast<char*>(args.out);
  pool.parallel_for(args.rows / kTileCols, [&args, out, k, panel](int64_t i) {
    if (args.dtype == Dtype::kBfloat16) {
      const bf16* const w = static_cast<const bf16*>(args.w) + i * panel;
      char* const to = out + i * fixed_group_bytes(k, sizeof(bf16));
      std::memset(to, 0, kTileCols * sizeof(float));
      interleave<2>(w, k, k, reinterpret_cast<bf16*>(to + kTileCols * sizeof(float)));
    } else {
      pack_int8_rows<4>(static_cast<const int8_t*>(args.w) + i * panel, args.scales + i * panel / args.group, k,
                        args.group, out + i * (k / args.group) * fixed_group_bytes(args.group, sizeof(int8_t)));
    }
  });
}
