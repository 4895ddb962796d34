// Rows to columns, for vectors of x86. Included by vec_avx2.h and vec_avx512.h.

// Floats [0, 4) of kLanes rows, transposed: r[j] holds element j of each row.
template <typename Row>
inline void load_transposed_4(const Row& row, vf r[4]) {
  vf t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) t[i] = load_quads([&](int quad) { return row(i + 4 * quad); });
  const vf u0 = unpack_low(t[0], t[1]), u1 = unpack_high(t[0], t[1]);
  const vf u2 = unpack_low(t[2], t[3]), u3 = unpack_high(t[2], t[3]);
  r[0] = first_pairs(u0, u2);
  r[1] = last_pairs(u0, u2);
  r[2] = first_pairs(u1, u3);
  r[3] = last_pairs(u1, u3);
}

// kLanes rows of 2 * kPairs elements, `row(i)` points to one, as kPairs pairs of vectors, out + j * lane_stride and
// out + half_stride + j * lane_stride: of bfloat16 elements 2 j and 2 j + 1, of floats j and kPairs + j.
template <typename Row>
inline void store_pairs_transposed(const bf16*, const Row& row, float* out, int64_t lane_stride, int64_t half_stride) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    vf r[4];
    load_transposed_4([&](int i) { return reinterpret_cast<const float*>(row(i)) + 4 * half; }, r);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      float* dst = out + (4 * half + j) * lane_stride;
      store(dst, even_half(r[j]));
      store(dst + half_stride, odd_half(r[j]));
    }
  }
}
template <typename Row>
inline void store_pairs_transposed(const float*, const Row& row, float* out, int64_t lane_stride,
                                   int64_t half_stride) {
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    vf r[4];
    load_transposed_4([&](int i) { return row(i) + 4 * quarter; }, r);
    float* dst = out + quarter / 2 * half_stride + quarter % 2 * 4 * lane_stride;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) store(dst + j * lane_stride, r[j]);
  }
}
