// The small operations between the products: norms, rotary positions, writing keys and values into the pool.
#pragma once
#include "attention.cpp"

struct Rotation {
    const float* cos;  // [positions, D]
    const float* sin;
};

// 1 / sqrt(mean(x^2) + eps)
inline float rms(const float* x, int n, float eps) {
    vec squares = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / n + eps);
}

template <class F>
inline void norm(const float* x, const float* weight, int n, float eps, typename F::act* out) {
    const vec by = all(rms(x, n, eps));
    for (int i = 0; i < n; i += LANES) F::store(out + i, load(x + i) * by * load(weight + i));
}

// One head in place: an optional norm, then the rotation of its two halves (Su et al. 2021, in the half-split form).
inline void rotate(float* x, const float* weight, int d, float eps, const float* cos, const float* sin) {
    if (weight) {
        const float by = rms(x, d, eps);
        for (int i = 0; i < d; i++) x[i] = x[i] * by * weight[i];
    }
    const int half = d / 2;
    for (int i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

// Puts one token's key and value of one head into the pool's layout (attention.cpp). Who begins a tile clears the values
// after the `ahead` tokens that this step writes: they are multiplied by a weight of zero until they are written, and
// what the block's last owner left there may be NaN. Returns whether all numbers are finite.
template <class F>
inline bool keep(const float* key, const float* value, int d, int place, int ahead, int block_tokens,
                 typename F::elem* at) {
    const size_t tile = (size_t)LANES * d;
    const int lane = place % LANES;
    typename F::elem narrow[512];
    vec nothing = all(0.0f);  // x - x: 0, or NaN where x is not finite
    auto convert = [&](const float* from) {
        for (int i = 0; i < d; i += LANES) {
            const vec x = load(from + i);
            nothing = nothing + (x - x);
            F::put(narrow + i, x);
        }
    };
    convert(key);
    auto* keys = (unit*)(at + place / LANES * tile);  // [D in units][16 tokens]
    for (int i = 0; i < d / F::PACK; i++) std::memcpy(keys + i * LANES + lane, narrow + i * F::PACK, sizeof(unit));
    convert(value);
    auto* values = at + (size_t)block_tokens * d + place / F::PACK * F::PACK * (size_t)d;  // [token in units][D]
    for (int i = 0; i < d; i++) values[i * F::PACK + place % F::PACK] = narrow[i];
    for (int token = lane ? LANES : ahead; token < LANES; token++) {
        auto* unwritten = values + token / F::PACK * F::PACK * (size_t)d + token % F::PACK;
        for (int i = 0; i < d; i++) unwritten[i * F::PACK] = 0;
    }
    return !any(nothing != nothing);
}
