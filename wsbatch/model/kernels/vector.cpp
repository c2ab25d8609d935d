// Number formats and the one inner product everything is made of.
//
// Operands are read in units of 4 bytes: one float, or two bfloat16 along the summed dimension. A matrix B to be
// multiplied is stored in panels of 16 columns, [unit][16 columns], so that one 64-byte load holds one unit of 16
// columns and no horizontal sum is ever needed. Weights, cached keys and cached values all have this form.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

using unit = int32_t;
constexpr int LANES = 16;

struct F32 {
    using elem = float;
    static constexpr int PACK = 1;  // elements in a unit
    static __m512 madd(__m512 acc, unit a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a)), _mm512_castsi512_ps(b), acc);
    }
    static void store(elem* to, __m512 value) { _mm512_storeu_ps(to, value); }
    static __m512 load(const elem* from) { return _mm512_loadu_ps(from); }
};

#ifdef __AVX512BF16__
struct BF16 {
    using elem = uint16_t;
    static constexpr int PACK = 2;
    static __m512 madd(__m512 acc, unit a, __m512i b) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
    }
    static void store(elem* to, __m512 value) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
    }
    static __m512 load(const elem* from) {
        __m256i half = _mm256_loadu_si256((const __m256i*)from);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
};
#endif

// acc[m][v] += sum over k of a[m][k] * b[v][k]: MR rows of A against NV panels of B.
// Rows of A are `lda` units apart; panel v starts at b[v], its units are `step` units apart. ahead(k) may prefetch.
template <class F, int MR, int NV, class Ahead>
inline __attribute__((always_inline)) void dot(__m512 (&acc)[MR][NV], const unit* a, size_t lda,
                                               const unit* const (&b)[NV], size_t step, int units, Ahead&& ahead) {
    for (int k = 0; k < units; k++) {
        ahead(k);
        __m512i column[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) column[v] = _mm512_loadu_si512(b[v] + k * step);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) acc[m][v] = F::madd(acc[m][v], a[m * lda + k], column[v]);
        }
    }
}

template <int MR, int NV>
inline __attribute__((always_inline)) void clear(__m512 (&acc)[MR][NV]) {
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) acc[m][v] = _mm512_setzero_ps();
    }
}

// Calls f with `count` (1..MAX) as a compile-time number.
template <int MAX, class Call>
inline void with_count(int count, Call&& f) {
    if constexpr (MAX > 1) {
        if (count < MAX) return with_count<MAX - 1>(count, f);
    }
    f(std::integral_constant<int, MAX>());
}

// 2^x, relative error under 3e-7 for x <= 0: 2^round(x) times a polynomial (Taylor, degree 7) on [-0.5, 0.5].
inline __m512 exp2_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // in this order: NaN stays NaN
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 t = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5252733804059841e-05f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.5403530393381609e-04f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.3333558146428443e-03f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(9.6181291076284772e-03f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(5.5504108664821580e-02f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(2.4022650695910072e-01f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(6.9314718055994531e-01f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

inline __m512 silu(__m512 x) {
    const float log2e = 1.4426950408889634f;
    // The argument is kept where 2^x is finite; beyond, silu is x or 0 to within rounding anyway.
    __m512 z = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-log2e)), _mm512_set1_ps(126.0f));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_ps(z)));
}
