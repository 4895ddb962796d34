// Causal attention over a paged cache. Included inside a namespace, after vec_*.h and tile.h.
//
// Keys are taken in blocks of kBlockKeys and in spans of kSpanKeys, both cut at absolute positions of the
// sequence. A span is an online softmax over its blocks (Dao et al. 2022, arXiv:2205.14135); spans are merged
// in order (flash-decoding). A masked key adds an exact 0 and a wholly masked block or span changes nothing,
// so a query's bits depend on its own keys alone: not on the batch, the chunk, the tile or the threads.

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kSpanKeys = 512;
constexpr int64_t kTileQueryRows = 96;  // query rows (queries x heads of a group) that share unpacked keys
constexpr int kFewQueryRows = 6;             // up to so many multiply values straight from the cache
constexpr int64_t kWorkForThreads = 200000;  // multiply-adds below which waking a thread costs more
constexpr float kNothing = -1e30f;      // the maximum of no score: finite, so that differences stay numbers
constexpr float kMasked = -3e38f;

struct QueryTag {};
struct KeyTag {};
struct ValueTag {};
struct ScoreTag {};
struct StateTag {};
struct PartialTag {};

// e^x for x <= 0, to about 1e-7; exactly 1 at 0 and exactly 0 below -87.
inline vf exp_nonpositive(vf x) {
  const vf limit = set1(-87.0f);
  const vf y = max(x, limit);
  const vf n = round_nearest(mul(y, set1(1.44269504088896341f)));
  const vf r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), y));
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set1(1.0f));
  return keep_if_ge(scale_by_power_of_two(p, n), x, limit);
}
inline float exp_nonpositive(float x) {
  float lanes[kLanes];
  store(lanes, exp_nonpositive(set1(x)));
  return lanes[0];
}
// cap * tanh(s / cap)
inline vf soft_capped(vf s, float cap) {
  const vf size = mul(max(s, sub(zero(), s)), set1(-2.0f / cap));
  const vf e = exp_nonpositive(size);
  const vf value = mul(div(sub(set1(1.0f), e), add(set1(1.0f), e)), set1(cap));
  const vf zeros = zero();
  return sub(keep_if_ge(value, s, zeros), keep_if_ge(value, sub(zeros, s), zeros));
}

// One unit of work: some queries of one row, for the query heads of some kv heads.
struct Item {
  int64_t row;
  int64_t first_head, heads;  // kv heads
  int64_t first_query, queries;
  int64_t first_position;  // of its first query
  int64_t begin, end;      // keys that any of its queries may see
};

// Softmax state of `rows` query rows: maximum, sum, and unscaled output [rows][head_dim].
struct State {
  float* maximum;
  float* sum;
  float* out;
};

inline int64_t state_floats(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }
inline State state_at(float* p, int64_t rows) { return State{p, p + rows, p + 2 * rows}; }
inline State from_row(State s, int64_t row, int64_t head_dim) {
  return State{s.maximum + row, s.sum + row, s.out + row * head_dim};
}
inline void clear(State s, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) s.maximum[r] = kNothing;
  std::memset(s.sum, 0, rows * (head_dim + 1) * sizeof(float));
}

// total = total then part.
inline void merge(State total, State part, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float maximum = total.maximum[r] > part.maximum[r] ? total.maximum[r] : part.maximum[r];
    const float keep = exp_nonpositive(total.maximum[r] - maximum), take = exp_nonpositive(part.maximum[r] - maximum);
    total.maximum[r] = maximum;
    total.sum[r] = total.sum[r] * keep + part.sum[r] * take;
    const vf k = set1(keep), t = set1(take);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      float* out = total.out + r * head_dim + d;
      store(out, fma(load(out), k, mul(load(part.out + r * head_dim + d), t)));
    }
  }
}

// Panels that few rows take at once: with less accumulators they would wait for each other.
constexpr int side_panels(int rows) { return kTileVectors == 1 || rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// c[r, :] (+)= sum_s a[r * a_row + s] * b[panel][s][:], for any number of rows and panels.
template <Into kInto>
inline void product(int64_t rows, const float* a, int64_t a_row, const float* b, int64_t b_panel, int64_t panels,
                    int64_t steps, float* c, int64_t c_row) {
  const char* const here = reinterpret_cast<const char*>(b);
  if (rows <= kFewQueryRows) {
    return with_rows<kFewQueryRows>(static_cast<int>(rows), [&](auto count) {
      constexpr int kSide = side_panels(count);
      int64_t p = 0;
      const auto add = [&](auto side) {
        tile<count, side, kInto>(a, a_row, 1, b + p * b_panel, b_panel, steps, c + p * kTileCols, c_row, here, 0);
      };
      for (; p + kSide <= panels; p += kSide) add(std::integral_constant<int, kSide>());
      for (; p < panels; ++p) add(std::integral_constant<int, 1>());
    });
  }
  for (int64_t p = 0; p < panels; ++p) {
    for_each_row_tile(rows, [&](int64_t row, int few) {
      with_rows<kTileRows>(few, [&](auto count) {
        tile<count, 1, kInto>(a + row * a_row, a_row, 1, b + p * b_panel, 0, steps, c + row * c_row + p * kTileCols,
                              c_row, here, 0);
      });
    });
  }
}

// As for floats, whose layout it gives.
template <typename Row>
inline void store_pairs_transposed(const int8_t*, const Row& row, float* out, int64_t lane_stride,
                                   int64_t half_stride) {
  alignas(64) float wide[kLanes][2 * kPairs];
  for (int i = 0; i < kLanes; ++i) {
    for (int e = 0; e < 2 * kPairs; e += kLanes) store(wide[i] + e, load_row(row(i) + e));
  }
  const auto wide_row = [&wide](int i) -> const float* { return wide[i]; };
  store_pairs_transposed(wide[0], wide_row, out, lane_stride, half_stride);
}

template <typename KV>
class Attention {
 public:
  // Elements behind the values of a head in the pool: the bytes of their scale.
  static constexpr int64_t kScaleSize = sizeof(KV) == 1 ? kInt8ScaleBytes : 0;

  explicit Attention(const AttentionArgs& args)
      : args_(args), group_(args.heads / args.kv_heads), dim_(args.head_dim), head_size_(dim_ + kScaleSize) {}

  // The keys of the cache that row b's queries may see end here; the table's width bounds a wrong length.
  int64_t context_len(int64_t b) const {
    const int64_t most = args_.table_width * args_.page_size, len = args_.context_lens[b];
    return len < 0 ? 0 : len < most ? len : most;
  }
  int64_t query_len(int64_t b) const {
    int64_t len = args_.query_lens[b];
    if (len > args_.queries) len = args_.queries;
    if (len > context_len(b)) len = context_len(b);
    return len < 0 ? 0 : len;
  }
  int64_t queries_per_tile() const { return group_ < kTileQueryRows ? kTileQueryRows / group_ : 1; }

  Item item(int64_t b, int64_t first_head, int64_t heads, int64_t first_query) const {
    const int64_t len = query_len(b), per_tile = queries_per_tile();
    const int64_t queries = len - first_query < per_tile ? len - first_query : per_tile;
    const int64_t position = context_len(b) - len + first_query;
    const int64_t begin = args_.window > 0 && position - args_.window + 1 > 0 ? position - args_.window + 1 : 0;
    return Item{b, first_head, heads, first_query, queries, position, begin, position + queries};
  }
  int64_t rows(const Item& item) const { return item.heads * item.queries * group_; }

  // Attention of an item over the keys of one span. `state` is overwritten. `following`, or null, is what this
  // thread takes after the item: its first keys are asked for while the last ones of the item are computed.
  void attend_span(const Item& item, int64_t span, State state, const Item* following) const {
    const int64_t rows = item.queries * group_;  // of one kv head
    const float* q = load_queries(item);
    float* keys = thread_scratch<KeyTag>(kBlockKeys * dim_);
    float* values = thread_scratch<ValueTag>(kBlockKeys * dim_);
    float* scores = thread_scratch<ScoreTag>(rows * kBlockKeys);
    clear(state, this->rows(item), dim_);
    const int64_t begin = item.begin > span * kSpanKeys ? item.begin : span * kSpanKeys;
    const int64_t end = item.end < (span + 1) * kSpanKeys ? item.end : (span + 1) * kSpanKeys;
    Block block, next;
    locate(item, begin / kBlockKeys * kBlockKeys, &next);
    for (int64_t start = begin / kBlockKeys * kBlockKeys; start < end; start += kBlockKeys) {
      block = next;
      if (start + kBlockKeys < item.end) {
        locate(item, start + kBlockKeys, &next);
      } else if (following != nullptr) {
        locate(*following, following->begin / kBlockKeys * kBlockKeys, &next);
      } else {
        next.live = 0;
      }
      const int64_t live = end - start < kBlockKeys ? end - start : kBlockKeys;
      const int64_t panels = (live + kTileCols - 1) / kTileCols;
      for (int64_t h = 0; h < item.heads; ++h) {
        const State part = from_row(state, h * rows, dim_);
        const int64_t head = (item.first_head + h) * head_size_;
        pack_keys(static_cast<const KV*>(args_.k_pages) + head, block, next, panels * kTileCols, keys);
        if (rows <= kFewQueryRows) ask(static_cast<const KV*>(args_.k_pages) + head, next, panels * kTileCols);
        product<Into::kFresh>(rows, q + h * rows * dim_, dim_, keys, kTileCols * dim_, panels, dim_, scores,
                              kBlockKeys);
        const KV* const v = static_cast<const KV*>(args_.v_pages) + head;
        float key_scales[kBlockKeys], value_scales[kBlockKeys];
        if (kScaleSize > 0) {
          load_scales(static_cast<const KV*>(args_.k_pages) + head, block, panels * kTileCols, key_scales);
          load_scales(v, block, panels * kTileCols, value_scales);
        }
        softmax(item, start, panels * kTileCols, key_scales, value_scales, scores, part);
        if (rows <= kFewQueryRows) {
          add_rows(rows, scores, v, block, next, live, part.out);
          ask(v, next, live);
        } else {
          pack_values(v, block, next, live, values);
          product<Into::kContinue>(rows, scores, kBlockKeys, values, kTileCols * kBlockKeys, dim_ / kTileCols, live,
                                   part.out, dim_);
        }
      }
    }
  }

  // Asks the memory for the first keys and values of an item.
  void ask_first(const Item& item) const {
    Block block;
    locate(item, item.begin / kBlockKeys * kBlockKeys, &block);
    for (int64_t h = 0; h < item.heads; ++h) {
      ask(static_cast<const KV*>(args_.k_pages) + (item.first_head + h) * head_size_, block, 0);
      ask(static_cast<const KV*>(args_.v_pages) + (item.first_head + h) * head_size_, block, 0);
    }
  }

  void write(const Item& item, State total) const {
    for (int64_t r = 0; r < rows(item); ++r) {
      float inverse = 1.0f / total.sum[r];
      if (args_.sinks != nullptr) {
        const int64_t head = query_offset(item, r) / dim_ % args_.heads;
        const float sink = args_.sinks[head], most = total.maximum[r] > sink ? total.maximum[r] : sink;
        const float keep = exp_nonpositive(total.maximum[r] - most);
        inverse = keep / (total.sum[r] * keep + exp_nonpositive(sink - most));
      }
      const float* sum = total.out + r * dim_;
      if (args_.q_dtype == Dtype::kBfloat16) {
        bf16* out = static_cast<bf16*>(args_.out) + query_offset(item, r);
        for (int64_t d = 0; d < dim_; ++d) from_float(sum[d] * inverse, out + d);
      } else {
        float* out = static_cast<float*>(args_.out) + query_offset(item, r);
        for (int64_t d = 0; d < dim_; ++d) out[d] = sum[d] * inverse;
      }
    }
  }

 private:
  // Where the keys of a block lie: elements from the start of the pool.
  struct Block {
    int64_t offset[kBlockKeys];
    int64_t live;  // of them keys that a query sees, or that come before one
  };

  // Row r of an item: kv head, then query, then query head of the kv head's group.
  int64_t query_offset(const Item& item, int64_t r) const {
    const int64_t rows = item.queries * group_, in_head = r % rows;
    const int64_t query = item.first_query + in_head / group_;
    const int64_t head = (item.first_head + r / rows) * group_ + in_head % group_;
    return ((item.row * args_.queries + query) * args_.heads + head) * dim_;
  }

  const float* load_queries(const Item& item) const {
    float* q = thread_scratch<QueryTag>(rows(item) * dim_);
    for (int64_t r = 0; r < rows(item); ++r) {
      if (args_.q_dtype == Dtype::kBfloat16) {
        const bf16* src = static_cast<const bf16*>(args_.q) + query_offset(item, r);
        for (int64_t d = 0; d < dim_; ++d) q[r * dim_ + d] = to_float(src[d]) * args_.scale;
      } else {
        const float* src = static_cast<const float*>(args_.q) + query_offset(item, r);
        for (int64_t d = 0; d < dim_; ++d) q[r * dim_ + d] = src[d] * args_.scale;
      }
    }
    return q;
  }

  // Keys of the block at `start` that no query sees, before the item's first key and after its last one, repeat
  // a key that one does see: masked or not, nothing else is read. A page number outside of the pool, which a
  // correct caller never passes, reads the nearest page instead of foreign memory.
  void locate(const Item& item, int64_t start, Block* block) const {
    const int32_t* table = args_.page_table + item.row * args_.table_width;
    const int64_t last_page = args_.slots / args_.page_size - 1, slot = args_.kv_heads * head_size_;
    const int64_t first = item.begin > start ? item.begin - start : 0;
    const int64_t live = item.end - start < kBlockKeys ? item.end - start : kBlockKeys;
    int64_t page = (start + first) / args_.page_size, offset = (start + first) % args_.page_size;
    for (int64_t i = first; i < live; ++page, offset = 0) {
      int64_t number = table[page];
      number = number < 0 ? 0 : number > last_page ? last_page : number;
      for (; offset < args_.page_size && i < live; ++offset, ++i) {
        block->offset[i] = (number * args_.page_size + offset) * slot;
      }
    }
    for (int64_t i = 0; i < first; ++i) block->offset[i] = block->offset[first];
    for (int64_t i = live; i < kBlockKeys; ++i) block->offset[i] = block->offset[live - 1];
    block->live = live;
  }

  // Asks the memory for the keys or values of a head in `next`, from number `first` on.
  void ask(const KV* pages, const Block& next, int64_t first) const {
    for (int64_t i = first; i < next.live; ++i) {
      for (int64_t d = 0; d < dim_; d += 64 / sizeof(KV)) __builtin_prefetch(pages + next.offset[i] + d, 0, 2);
    }
  }

  // The scales of a head's keys or values.
  void load_scales(const KV* pages, const Block& block, int64_t keys, float* out) const {
    for (int64_t i = 0; i < keys; ++i) std::memcpy(out + i, pages + block.offset[i] + dim_, sizeof(float));
  }

  // To float32 [key / kTileCols][dim][key % kTileCols]. Asks the memory for the same keys of block `next`.
  void pack_keys(const KV* pages, const Block& block, const Block& next, int64_t keys, float* out) const {
    for (int64_t t = 0; t < keys; t += kLanes) {
      float* dst = out + t / kTileCols * kTileCols * dim_ + t % kTileCols;
      for (int64_t d = 0; d < dim_; d += 2 * kPairs) {
        const auto row = [&](int i) { return pages + block.offset[t + i] + d; };
        if (d % (64 / sizeof(KV)) == 0) {
          for (int i = 0; i < kLanes; ++i) __builtin_prefetch(pages + next.offset[t + i] + d, 0, 2);
        }
        // A pair of bfloat16 lies in one lane, a pair of floats in the two halves.
        if (sizeof(KV) == 2) {
          store_pairs_transposed(pages, row, dst + d * kTileCols, 2 * kTileCols, kTileCols);
        } else {
          store_pairs_transposed(pages, row, dst + d * kTileCols, kTileCols, kPairs * kTileCols);
        }
      }
    }
  }

  // To float32 [dim / kTileCols][key][dim % kTileCols]. Asks the memory for the same keys of block `next`.
  void pack_values(const KV* pages, const Block& block, const Block& next, int64_t keys, float* out) const {
    for (int64_t i = 0; i < keys; ++i) {
      const KV* value = pages + block.offset[i];
      const KV* ahead = pages + next.offset[i];
      for (int64_t d = 0; d < dim_; d += kTileCols) {
        float* dst = out + d * kBlockKeys + i * kTileCols;
        for (int v = 0; v < kTileCols; v += kLanes) store(dst + v, load_row(value + d + v));
        if (d % (64 / sizeof(KV)) == 0) __builtin_prefetch(ahead + d, 0, 2);
      }
    }
  }

  // out[r, :] += sum_i weights[r, i] * value i, in order of i: what product() does, for few rows and straight
  // from the cache. Asks the memory for the same values of block `next`.
  void add_rows(int64_t rows, const float* weights, const KV* pages, const Block& block, const Block& next,
                  int64_t keys, float* out) const {
    with_rows<kFewQueryRows>(static_cast<int>(rows), [&](auto count) {
      constexpr int kSide = side_panels(count);
      int64_t d = 0;
      for (; d + kSide * kTileCols <= dim_; d += kSide * kTileCols) {
        add_values<count, kSide>(weights, pages + d, block, next, keys, out + d);
      }
      for (; d < dim_; d += kTileCols) add_values<count, 1>(weights, pages + d, block, next, keys, out + d);
    });
  }

  template <int kRows, int kPanels>
  void add_values(const float* weights, const KV* values, const Block& block, const Block& next, int64_t keys,
                  float* out) const {
    constexpr int kVectors = kTileVectors * kPanels, kLineVectors = 64 / sizeof(KV) / kLanes;  // of a cache line
    vf acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = load(out + r * dim_ + v * kLanes);
    }
    for (int64_t i = 0; i < keys; ++i) {
      const KV* value = values + block.offset[i];
      const KV* ahead = values + next.offset[i];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v += kLineVectors) __builtin_prefetch(ahead + v * kLanes, 0, 2);
      vf x[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) x[r] = set1(weights[r * kBlockKeys + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const vf y = load_row(value + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r][v] = fma(x[r], y, acc[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(out + r * dim_ + v * kLanes, acc[r][v]);
    }
  }

  // Scores of keys [start, start + keys) become weights; the state's sums and outputs are rescaled. A key's scale,
  // where it has one, is a factor of its scores, that of its value one of its weights.
  void softmax(const Item& item, int64_t start, int64_t keys, const float* key_scales, const float* value_scales,
               float* scores, State state) const {
    for (int64_t r = 0; r < item.queries * group_; ++r) {
      float* row = scores + r * kBlockKeys;
      if (kScaleSize > 0) {
        for (int64_t t = 0; t < keys; t += kLanes) store(row + t, mul(load(row + t), load(key_scales + t)));
      }
      if (args_.soft_cap > 0.0f) {
        for (int64_t t = 0; t < keys; t += kLanes) store(row + t, soft_capped(load(row + t), args_.soft_cap));
      }
      const int64_t position = item.first_position + r / group_;
      const int64_t past = position + 1 - start;
      const int64_t before = args_.window > 0 ? position - args_.window + 1 - start : 0;
      for (int64_t t = past < 0 ? 0 : past; t < keys; ++t) row[t] = kMasked;
      for (int64_t t = 0; t < before && t < keys; ++t) row[t] = kMasked;

      vf most = set1(state.maximum[r]);
      for (int64_t t = 0; t < keys; t += kLanes) most = max(load(row + t), most);
      float lanes[kLanes];
      store(lanes, most);
      float maximum = lanes[0];
      for (int i = 1; i < kLanes; ++i) maximum = lanes[i] > maximum ? lanes[i] : maximum;

      const vf peak = set1(maximum);
      vf sums = zero();
      for (int64_t t = 0; t < keys; t += kLanes) {
        const vf p = exp_nonpositive(sub(load(row + t), peak));
        store(row + t, kScaleSize > 0 ? mul(p, load(value_scales + t)) : p);
        sums = add(sums, p);
      }
      store(lanes, sums);
      float sum = lanes[0];
      for (int i = 1; i < kLanes; ++i) sum += lanes[i];

      if (maximum != state.maximum[r]) {
        const float keep = exp_nonpositive(state.maximum[r] - maximum);
        const vf k = set1(keep);
        state.sum[r] *= keep;
        state.maximum[r] = maximum;
        float* out = state.out + r * dim_;
        for (int64_t d = 0; d < dim_; d += kLanes) store(out + d, mul(load(out + d), k));
      }
      state.sum[r] += sum;
    }
  }

  const AttentionArgs& args_;
  const int64_t group_, dim_;
  const int64_t head_size_;  // elements of a head in the pool
};

template <typename KV>
void attention_typed(const AttentionArgs& args, Pool& pool) {
  const Attention<KV> attention(args);
  const int64_t per_tile = attention.queries_per_tile(), dim = args.head_dim;
  const auto spans = [](const Item& item) { return (item.end - 1) / kSpanKeys + 1 - item.begin / kSpanKeys; };
  int64_t tiles = 0, tile_spans = 0, work = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t len = attention.query_len(b);
    const int64_t bytes = args.heads * dim * (args.q_dtype == Dtype::kBfloat16 ? sizeof(bf16) : sizeof(float));
    std::memset(static_cast<char*>(args.out) + (b * args.queries + len) * bytes, 0, (args.queries - len) * bytes);
    for (int64_t query = 0; query < len; query += per_tile) {
      const Item item = attention.item(b, 0, args.kv_heads, query);
      ++tiles;
      tile_spans += spans(item);
      work += (item.end - item.begin) * (attention.rows(item) + 16 * args.kv_heads) * dim;
    }
  }
  if (tiles == 0) return;
  const int threads = work < kWorkForThreads ? 1 : pool.num_threads();

  // A decoding row reads whole slots, all kv heads at once, as long as that leaves enough units for the
  // threads; if it takes that, the spans of an item become units of their own, merged at the end.
  const int64_t wanted = threads == 1 ? 1 : 4 * threads;
  const bool whole_slots = args.heads <= kTileQueryRows && args.queries == 1 && tile_spans >= wanted;
  const int64_t heads = whole_slots ? args.kv_heads : 1;
  const bool split = tiles * (args.kv_heads / heads) < wanted && tile_spans > tiles;
  std::vector<Item> items;
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t query = 0; query < attention.query_len(b); query += per_tile) {
      for (int64_t head = 0; head < args.kv_heads; head += heads) {
        items.push_back(attention.item(b, head, heads, query));
      }
    }
  }
  // Longest first: the last units to be taken are the short ones.
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.queries * (a.end - a.begin) > b.queries * (b.end - b.begin);
  });

  if (split) {
    struct Part {
      const Item* item;
      int64_t span;
      float* state;
    };
    std::vector<Part> parts;
    int64_t floats = 0;
    for (const Item& item : items) {
      for (int64_t span = item.begin / kSpanKeys; span * kSpanKeys < item.end; ++span) {
        parts.push_back(Part{&item, span, nullptr});
        floats += state_floats(attention.rows(item), dim);
      }
    }
    float* next = thread_scratch<PartialTag>(floats);
    for (Part& part : parts) {
      part.state = next;
      next += state_floats(attention.rows(*part.item), dim);
    }
    pool.parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t i) {
      const Part& part = parts[i];
      attention.attend_span(*part.item, part.span, state_at(part.state, attention.rows(*part.item)), nullptr);
    });
    for (size_t i = 0; i < parts.size();) {
      const Item& item = *parts[i].item;
      const int64_t rows = attention.rows(item);
      const State total = state_at(thread_scratch<StateTag>(state_floats(rows, dim)), rows);
      clear(total, rows, dim);
      for (; i < parts.size() && parts[i].item == &item; ++i) merge(total, state_at(parts[i].state, rows), rows, dim);
      attention.write(item, total);
    }
    return;
  }

  const auto attend = [&](const Item& item, const Item* following) {
    const int64_t rows = attention.rows(item), floats = state_floats(rows, dim);
    float* memory = thread_scratch<StateTag>(2 * floats);
    const State total = state_at(memory, rows), part = state_at(memory + floats, rows);
    clear(total, rows, dim);
    for (int64_t span = item.begin / kSpanKeys; span * kSpanKeys < item.end; ++span) {
      attention.attend_span(item, span, part, following);
      merge(total, part, rows, dim);
    }
    attention.write(item, total);
  };
  // Items that decode are taken several at a time, so that a thread knows what it reads next.
  const int64_t count = static_cast<int64_t>(items.size());
  int64_t chunk = threads == 1 ? count : args.queries == 1 ? count / (4 * threads) : 1;
  if (chunk < 1) chunk = 1;
  const auto attend_chunk = [&](int64_t i) {
    const int64_t end = (i + 1) * chunk < count ? (i + 1) * chunk : count;
    if (args.queries == 1) attention.ask_first(items[i * chunk]);
    for (int64_t j = i * chunk; j < end; ++j) attend(items[j], j + 1 < end ? &items[j + 1] : nullptr);
  };
  if (threads == 1) {
    attend_chunk(0);
  } else {
    pool.parallel_for((count + chunk - 1) / chunk, attend_chunk);
  }
}

void paged_attention(const AttentionArgs& args, Pool& pool) {
  if (args.kv_dtype == Dtype::kBfloat16) {
    attention_typed<bf16>(args, pool);
  } else if (args.kv_dtype == Dtype::kInt8) {
    attention_typed<int8_t>(args, pool);
  } else {
    attention_typed<float>(args, pool);
  }
}
