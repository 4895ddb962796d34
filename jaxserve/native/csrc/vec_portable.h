// Four float lanes in the vector extension of GCC and Clang, for every other CPU: SSE2, NEON and the like.
// Included inside a namespace. The functions are those of vec_avx2.h.

constexpr int kLanes = 4;
constexpr int kTileVectors = 2;
constexpr int kPairs = kLanes;

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));

inline vf zero() { return vf{}; }
inline vf set1(float x) { return vf{x, x, x, x}; }
inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf keep_if_ge(vf a, vf x, vf limit) { return x >= limit ? a : vf{}; }
inline vf round_nearest(vf x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::nearbyintf(x[i]);
  return x;
}
inline vf scale_by_power_of_two(vf x, vf n) {
  const vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
  vf power;
  std::memcpy(&power, &bits, sizeof power);
  return x * power;
}

inline vf load_half(const bf16* p, int half) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  v = half == 0 ? v << 16 : v & static_cast<int32_t>(0xffff0000u);
  vf result;
  std::memcpy(&result, &v, sizeof result);
  return result;
}
inline vf load_half(const float* p, int half) { return load(p + half * kLanes); }

template <typename T>
inline vf load_row(const T* p) {
  return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}

inline void store_rounded(bf16* p, vf v) {
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
}

inline vf add_lanes_in_order(vf total, const float* p) {
  for (int j = 0; j < kLanes; ++j, ++p) total += vf{p[0], p[kLanes], p[2 * kLanes], p[3 * kLanes]};
  return total;
}

template <typename T, typename Row>
inline void store_pairs_transposed(const T*, const Row& row, float* out, int64_t lane_stride, int64_t half_stride) {
  vf x[kLanes], y[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    x[i] = load_half(row(i), 0);
    y[i] = load_half(row(i), 1);
  }
  for (int j = 0; j < kLanes; ++j, out += lane_stride) {
    store(out, vf{x[0][j], x[1][j], x[2][j], x[3][j]});
    store(out + half_stride, vf{y[0][j], y[1][j], y[2][j], y[3][j]});
  }
}

inline vf max_or_nan(vf a, vf b) {
  const vf larger = a > b ? a : b;
  return (a != a) ? a : (b != b) ? b : larger;
}
inline vf to_floats(vi v) { return __builtin_convertvector(v, vf); }
inline vi load_pairs(const int16_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vi load_pairs(const int8_t* p) {
  int16_t wide[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) wide[i] = p[i];
  return load_pairs(wide);
}
inline void store_pairs(int16_t* p, vi v) { std::memcpy(p, &v, sizeof v); }
inline void store_fixed(int16_t* p, vf v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(std::lrintf(v[i]));
}
constexpr int fixed_chains(int) { return 1; }
constexpr int kFixedRows = 6;
inline vi add_whole(vi a, vi b) { return a + b; }
inline void add_pairs(const int32_t* x, const vi (&b)[kTileVectors], vi (&a)[kTileVectors]) {
  int16_t pair[2];
  std::memcpy(pair, x, sizeof pair);
  const auto dot = [&pair](vi b) { return (b << 16 >> 16) * pair[0] + (b >> 16) * pair[1]; };
  for (int v = 0; v < kTileVectors; ++v) a[v] += dot(b[v]);
}
