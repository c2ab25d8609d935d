// Sixteen numbers side by side, on every processor: GCC's and Clang's vector extensions, in as many registers as it
// takes (one of AVX-512, two of AVX2, four of NEON or SSE).
//
// Each operation rounds once, in the order that is written: the build forbids the compiler to contract a product and a
// sum (-ffp-contract=off), and `fma` is a fused one exactly where the processor has it. So a result does not depend on
// which loop an expression stands in.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int REGISTERS = LANES / WIDTH;

typedef float fpart __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ipart __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t hpart __attribute__((vector_size(WIDTH * 2)));

struct vec {
    fpart p[REGISTERS];
};
struct ivec {
    ipart p[REGISTERS];
};

// Calls f(0), ..., f(N - 1) with compile-time numbers.
template <int N, class Call>
INLINE void each(Call&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>()), ...);
    }(std::make_integer_sequence<int, N>());
}

template <class V, class Call>
INLINE V lanewise(Call&& f) {
    V made;
    each<REGISTERS>([&](auto i) __attribute__((always_inline)) { made.p[i] = f(i); });
    return made;
}
#define LANEWISE(V, EXPRESSION) return lanewise<V>([&](auto i) __attribute__((always_inline)) { return EXPRESSION; })

template <class T>
INLINE T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

INLINE vec load(const float* from) { LANEWISE(vec, read<fpart>(from + i * WIDTH)); }
INLINE ivec load(const int32_t* from) { LANEWISE(ivec, read<ipart>(from + i * WIDTH)); }
INLINE void store(float* to, const vec& x) { std::memcpy(to, &x, sizeof(x)); }
INLINE void store(int32_t* to, const ivec& x) { std::memcpy(to, &x, sizeof(x)); }
INLINE fpart all_part(float x) { return x - fpart{}; }  // x + 0 would not be x where x is -0
INLINE vec all(float x) { LANEWISE(vec, all_part(x)); }
INLINE ivec all(int32_t x) { LANEWISE(ivec, x + ipart{}); }

INLINE vec operator+(const vec& a, const vec& b) { LANEWISE(vec, a.p[i] + b.p[i]); }
INLINE vec operator-(const vec& a, const vec& b) { LANEWISE(vec, a.p[i] - b.p[i]); }
INLINE vec operator*(const vec& a, const vec& b) { LANEWISE(vec, a.p[i] * b.p[i]); }
INLINE vec operator/(const vec& a, const vec& b) { LANEWISE(vec, a.p[i] / b.p[i]); }
INLINE ivec operator+(const ivec& a, const ivec& b) { LANEWISE(ivec, a.p[i] + b.p[i]); }
INLINE ivec operator&(const ivec& a, const ivec& b) { LANEWISE(ivec, a.p[i] & b.p[i]); }
INLINE ivec operator<=(const ivec& a, const ivec& b) { LANEWISE(ivec, (ipart)(a.p[i] <= b.p[i])); }
INLINE ivec operator>(const vec& a, const vec& b) { LANEWISE(ivec, (ipart)(a.p[i] > b.p[i])); }
INLINE ivec operator!=(const vec& a, const vec& b) { LANEWISE(ivec, (ipart)(a.p[i] != b.p[i])); }
INLINE vec select(const ivec& m, const vec& a, const vec& b) { LANEWISE(vec, m.p[i] ? a.p[i] : b.p[i]); }
INLINE ivec select(const ivec& m, const ivec& a, const ivec& b) { LANEWISE(ivec, m.p[i] ? a.p[i] : b.p[i]); }
// The second operand where either is NaN.
INLINE vec max(const vec& a, const vec& b) { LANEWISE(vec, a.p[i] > b.p[i] ? a.p[i] : b.p[i]); }
INLINE vec min(const vec& a, const vec& b) { LANEWISE(vec, a.p[i] < b.p[i] ? a.p[i] : b.p[i]); }

INLINE fpart fma_part(fpart a, fpart b, fpart c) {
#if defined(__AVX512F__)
    return (fpart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (fpart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (fpart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
// a * b + c
INLINE vec fma(const vec& a, const vec& b, const vec& c) { LANEWISE(vec, fma_part(a.p[i], b.p[i], c.p[i])); }

INLINE ivec lane_numbers() {
    const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}
INLINE bool any(const ivec& mask) {
    int32_t lanes[LANES], found = 0;
    store(lanes, mask);
    for (int32_t lane : lanes) found |= lane;
    return found;
}
INLINE float first(const vec& x) { return x.p[0][0]; }
INLINE float sum(const vec& x) {
    float v[LANES];
    store(v, x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
}
INLINE float highest(const vec& x) {
    float v[LANES];
    store(v, x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
    return v[0];
}

// 2^x for x <= 126, relative error under 3e-7; 2^-126 for any x below -126; NaN stays NaN. 2^round(x) times a polynomial
// (Taylor, degree 7) on [-0.5, 0.5].
INLINE vec exp2(const vec& argument) {
    const vec x = max(all(-126.0f), argument);
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: a sum with it has no place for a fraction
    const vec whole = (x + magic) - magic;
    const vec t = x - whole;
    vec p = all(1.5252733804059841e-05f);
    p = fma(p, t, all(1.5403530393381609e-04f));
    p = fma(p, t, all(1.3333558146428443e-03f));
    p = fma(p, t, all(9.6181291076284772e-03f));
    p = fma(p, t, all(5.5504108664821580e-02f));
    p = fma(p, t, all(2.4022650695910072e-01f));
    p = fma(p, t, all(6.9314718055994531e-01f));
    p = fma(p, t, all(1.0f));
    // The low bits of the sum with `magic` are round(x): moved up, they are a power's exponent less its bias.
    const vec power = lanewise<vec>([&](auto i) __attribute__((always_inline)) {
        const ipart bits = (ipart)(x.p[i] + magic.p[i]);
        return (fpart)((bits + 127) << 23);
    });
    return p * power;
}

INLINE vec silu(const vec& x) {
    const float log2e = 1.4426950408889634f;
    // The argument is kept where 2^x is finite; beyond, silu is x or 0 to within rounding anyway.
    return x / (all(1.0f) + exp2(min(all(126.0f), x * all(-log2e))));
}
