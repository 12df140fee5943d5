// Vectors of 16 floats, and the functions of them that every operation shares. fma is explicit, contraction is off
// (build.py), so that a value does not depend on how the compiler arranges a loop.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

constexpr long LANES = 16;
typedef uint16_t bfloat16;

#ifdef __AVX512F__
typedef __m512 Part;
#define FMA _mm512_fmadd_ps
#define WIDEN(p) (IntPart)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(p)))
#else
typedef __m256 Part;
#define FMA _mm256_fmadd_ps
#define WIDEN(p) (IntPart)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p)))
#endif
typedef int32_t IntPart __attribute__((vector_size(sizeof(Part))));
constexpr int PARTS = LANES * sizeof(float) / sizeof(Part);

struct Vec { Part part[PARTS]; };

#define UNROLL _Pragma("GCC unroll 16")
#define EACH UNROLL for (int i = 0; i < PARTS; ++i)
#define INLINE static inline __attribute__((always_inline))

INLINE Vec broadcast(float x) { Vec v; EACH v.part[i] = x - Part{}; return v; }
INLINE Vec load(const float* p) { Vec v; EACH std::memcpy(&v.part[i], p + LANES / PARTS * i, sizeof(Part)); return v; }
INLINE void store(float* p, const Vec& v) { EACH std::memcpy(p + LANES / PARTS * i, &v.part[i], sizeof(Part)); }
#define OPERATOR(op) INLINE Vec operator op(Vec a, const Vec& b) { EACH a.part[i] = a.part[i] op b.part[i]; return a; }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/)
INLINE Vec maximum(Vec a, const Vec& b) { EACH a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i]; return a; }
INLINE Vec minimum(Vec a, const Vec& b) { EACH a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i]; return a; }
INLINE Vec fma(Vec a, const Vec& b, const Vec& c) { EACH a.part[i] = FMA(a.part[i], b.part[i], c.part[i]); return a; }
// a where a >= low, else b.
INLINE Vec choose_at_least(const Vec& x, float low, Vec a, const Vec& b) {
    EACH a.part[i] = x.part[i] >= low ? a.part[i] : b.part[i];
    return a;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bfloat16 x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
// Round to nearest even; NaN stays NaN.
INLINE bfloat16 to_bfloat16(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return x != x ? 0x7fc0 : bfloat16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class W> INLINE W convert(float x) { return std::is_same_v<W, float> ? x : to_bfloat16(x); }
INLINE Vec load(const bfloat16* p) { Vec v; EACH v.part[i] = (Part)(WIDEN(p + LANES / PARTS * i) << 16); return v; }

// The first `count` (up to 16) values, `fill` in the other lanes.
INLINE Vec load(const float* p, long count, float fill = 0) {
    if (count >= LANES) return load(p);
    float lanes[LANES];
    for (long i = 0; i < LANES; ++i) lanes[i] = i < count ? p[i] : fill;
    return load(lanes);
}
INLINE void store(float* p, const Vec& v, long count) {
    if (count >= LANES) return store(p, v);
    std::memcpy(p, &v, count * sizeof(float));
}
INLINE void store_or_add(float* p, const Vec& v, long size, bool add) { store(p, add ? load(p, size) + v : v, size); }

// The lanes combined pairwise.
template <class F> INLINE float reduce(const Vec& v, F combine) {
    float lanes[LANES];
    store(lanes, v);
    for (long half = LANES / 2; half; half /= 2)
        for (long i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
    return lanes[0];
}
INLINE float sum(const Vec& v) { return reduce(v, [](float a, float b) { return a + b; }); }
INLINE float largest(const Vec& v) { return reduce(v, [](float a, float b) { return a > b ? a : b; }); }

// The polynomial of x with these coefficients, from the highest power on, after the leading one.
INLINE Vec polynomial(const Vec& x, float leading, std::initializer_list<float> others) {
    Vec y = broadcast(leading);
    for (float coefficient : others) y = fma(y, x, broadcast(coefficient));
    return y;
}

// exp within 2 units in the last place; 0 below the smallest normal result, saturated above 88.
INLINE Vec exponential(const Vec& x) {
    constexpr float low = -87.3f, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vec clipped = minimum(maximum(x, broadcast(low)), broadcast(88.0f));
    const Vec shifted = fma(clipped, broadcast(1.44269504088896341f), broadcast(magic));
    const Vec n = shifted - broadcast(magic);
    const Vec r = fma(n, broadcast(-1.42860682e-6f), fma(n, broadcast(-0.693145752f), clipped));  // x - n ln 2
    Vec y = polynomial(r, 1.0f / 5040, {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f});
    EACH y.part[i] = (Part)((IntPart)y.part[i] + ((IntPart)shifted.part[i] << 23));  // times 2^n
    return choose_at_least(x, low, y, broadcast(0.0f));
}
INLINE Vec sigmoid(const Vec& x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)); }
// tanh: a polynomial near 0, where 2 sigmoid(2 x) - 1 loses digits.
INLINE Vec hyperbolic_tangent(const Vec& x) {
    const Vec square = x * x;
    const Vec near = x * polynomial(square, 62.0f / 2835, {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f});
    const Vec far = fma(broadcast(2.0f), sigmoid(x + x), broadcast(-1.0f));
    return choose_at_least(square, 0.0625f, far, near);
}
INLINE Vec softcap(const Vec& x, float c) { return c ? broadcast(c) * hyperbolic_tangent(x / broadcast(c)) : x; }
// erfc(z) = exp(-z²) Q(1 / (1 + 0.4 z)) for z >= 0; Q fitted to 6e-8 of erfc itself, so gelu's tail keeps its digits.
INLINE Vec gelu(const Vec& x) {
    const Vec z = maximum(x, broadcast(0.0f) - x) * broadcast(0.70710678118654752f);
    const Vec t = broadcast(1.0f) / fma(z, broadcast(0.4f), broadcast(1.0f));
    const Vec q = polynomial(t, 0.0412507392f, {-0.140308946f, 0.0839675888f, 0.0879854634f, 0.0797426179f,
                                                0.193398908f, 0.201886162f, 0.226443306f, 0.225634217f});
    const Vec half_tail = broadcast(0.5f) * q * t * exponential(broadcast(0.0f) - z * z);
    return x * choose_at_least(x, 0.0f, broadcast(1.0f) - half_tail, half_tail);
}
INLINE Vec gelu_tanh(const Vec& x) {
    const Vec cubic = fma(x * x * x, broadcast(0.044715f), x);
    return x * sigmoid(cubic * broadcast(1.5957691216057308f));  // (1 + tanh u) / 2 = sigmoid(2 u)
}
