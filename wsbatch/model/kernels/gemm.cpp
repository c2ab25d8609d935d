// Products of activations with packed weights.
//
// Weights [N, K] are packed as [N / 16][K in units][16] (see vector.cpp). A task takes a group of panels and runs all
// rows against it, so a weight is read from memory once a step however many rows there are. Up to 8 rows the product is
// as fast as memory; beyond, blocks of rows re-read the group from the second-level cache.
#pragma once
#include "vector.cpp"

template <class F>
struct Matrix {
    const unit* panels;  // [panels][units][16]
    const float* bias;   // [N] or null
    int n, k;            // as in the model: out and in features

    int panel_count() const { return (n + LANES - 1) / LANES; }
    int units() const { return k / F::PACK; }
    const unit* panel(int p) const { return panels + (size_t)p * units() * LANES; }
    __m512 bias_at(int column) const { return bias ? _mm512_loadu_ps(bias + column) : _mm512_setzero_ps(); }
};

// Runs rows [0, m) of A against NV neighbouring panels; emit(row, acc[NV]) gets each row's sums.
template <class F, int MR_MAX, int NV, class Emit>
inline void group(const Matrix<F>& w, int first_panel, const typename F::elem* a, int m, Emit&& emit) {
    const unit* b[NV];
    for (int v = 0; v < NV; v++) b[v] = w.panel(first_panel + v);
    const size_t lda = w.units();
    const int blocks = (m + MR_MAX - 1) / MR_MAX;  // of nearly equal height, so that none is a sliver
    int row = 0;
    for (int block = 0; block < blocks; block++) {
        const int height = (m - row) / (blocks - block) + ((m - row) % (blocks - block) != 0);
        with_count<MR_MAX>(height, [&](auto mr) {
            constexpr int MR = decltype(mr)::value;
            __m512 acc[MR][NV];
            clear(acc);
            dot<F, MR, NV>(acc, (const unit*)a + row * lda, lda, b, LANES, w.units());
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) emit(row + i, acc[i]);
        });
        row += height;
    }
}

// Splits a matrix's panels into tasks of NV, with what is left over as tasks of one.
template <class F, int MR_MAX, int NV, class Emit>
inline void panels(const Matrix<F>& w, int task, const typename F::elem* a, int m, Emit&& emit) {
    const int whole = w.panel_count() / NV;
    if (task < whole) {
        group<F, MR_MAX, NV>(w, task * NV, a, m, [&](int row, __m512(&acc)[NV]) { emit(row, task * NV, acc); });
    } else {
        const int panel = whole * NV + (task - whole);
        group<F, MR_MAX, 1>(w, panel, a, m, [&](int row, __m512(&acc)[1]) { emit(row, panel, acc); });
    }
}

template <int NV>
inline int panel_tasks(int panel_count) {
    return panel_count / NV + panel_count % NV;
}
