// Eight float lanes on AVX2 and FMA. Included inside a namespace, under a target("avx2,fma") region.

constexpr int kLanes = 8;

using vf = __m256;
using vi = __m256i;

inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

// a where x >= limit, 0 elsewhere (also where x is NaN).
inline vf keep_if_ge(vf a, vf x, vf limit) {
  return _mm256_and_ps(a, _mm256_cmp_ps(x, limit, _CMP_GE_OQ));
}
inline vf round_nearest(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n in [-126, 127].
inline vf scale_by_power_of_two(vf x, vf n) {
  const vi bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}

// 2 * kLanes bfloat16: `a` takes the even elements, `b` the odd ones.
inline void load_pair(const bf16* p, vf& a, vf& b) {
  const vi v = _mm256_loadu_si256(reinterpret_cast<const vi*>(p));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
// 2 * kLanes floats: `a` takes the first half, `b` the second one.
inline void load_pair(const float* p, vf& a, vf& b) {
  a = _mm256_loadu_ps(p);
  b = _mm256_loadu_ps(p + kLanes);
}

// kLanes elements in their order.
inline vf load_row(const bf16* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
inline vf load_row(const float* p) { return _mm256_loadu_ps(p); }

inline void transpose(vf r[kLanes]) {
  const vf t0 = _mm256_unpacklo_ps(r[0], r[1]), t1 = _mm256_unpackhi_ps(r[0], r[1]);
  const vf t2 = _mm256_unpacklo_ps(r[2], r[3]), t3 = _mm256_unpackhi_ps(r[2], r[3]);
  const vf t4 = _mm256_unpacklo_ps(r[4], r[5]), t5 = _mm256_unpackhi_ps(r[4], r[5]);
  const vf t6 = _mm256_unpacklo_ps(r[6], r[7]), t7 = _mm256_unpackhi_ps(r[6], r[7]);
  const vf u0 = _mm256_shuffle_ps(t0, t2, 0x44), u1 = _mm256_shuffle_ps(t0, t2, 0xee);
  const vf u2 = _mm256_shuffle_ps(t1, t3, 0x44), u3 = _mm256_shuffle_ps(t1, t3, 0xee);
  const vf u4 = _mm256_shuffle_ps(t4, t6, 0x44), u5 = _mm256_shuffle_ps(t4, t6, 0xee);
  const vf u6 = _mm256_shuffle_ps(t5, t7, 0x44), u7 = _mm256_shuffle_ps(t5, t7, 0xee);
  r[0] = _mm256_permute2f128_ps(u0, u4, 0x20);
  r[1] = _mm256_permute2f128_ps(u1, u5, 0x20);
  r[2] = _mm256_permute2f128_ps(u2, u6, 0x20);
  r[3] = _mm256_permute2f128_ps(u3, u7, 0x20);
  r[4] = _mm256_permute2f128_ps(u0, u4, 0x31);
  r[5] = _mm256_permute2f128_ps(u1, u5, 0x31);
  r[6] = _mm256_permute2f128_ps(u2, u6, 0x31);
  r[7] = _mm256_permute2f128_ps(u3, u7, 0x31);
}

// kLanes rows of 2 * kLanes elements, given by pointers. a[j] and b[j] receive, for each row, what
// load_pair() puts into lane j of its `a` and `b`.
inline void load_pairs_transposed(const bf16* const rows[kLanes], vf a[kLanes], vf b[kLanes]) {
  vf r[kLanes];
  for (int i = 0; i < kLanes; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i]));
  transpose(r);
  const vi high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int j = 0; j < kLanes; ++j) {
    const vi v = _mm256_castps_si256(r[j]);
    a[j] = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    b[j] = _mm256_castsi256_ps(_mm256_and_si256(v, high));
  }
}
inline void load_pairs_transposed(const float* const rows[kLanes], vf a[kLanes], vf b[kLanes]) {
  for (int i = 0; i < kLanes; ++i) a[i] = _mm256_loadu_ps(rows[i]);
  transpose(a);
  for (int i = 0; i < kLanes; ++i) b[i] = _mm256_loadu_ps(rows[i] + kLanes);
  transpose(b);
}
