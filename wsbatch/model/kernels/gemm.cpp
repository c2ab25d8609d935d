// Products of activations with packed weights.
//
// Weights [N, K] are packed as [N / 16][K in units][16] (see vector.cpp). A task takes a group of panels and runs all
// rows against it, so a weight is read from memory once a step however many rows there are. Up to 8 rows the product is
// as fast as memory; beyond, blocks of rows re-read the group from the second-level cache.
#pragma once
#include <algorithm>

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

// Runs rows [0, m) of A against NV neighbouring panels; emit(row, first panel, acc[NV]) gets each row's sums.
// Once the panels are in cache, the blocks after the first fetch those at `next` (or null) between them.
template <class F, int MR_MAX, int NV, class Emit>
inline void group(const Matrix<F>& w, int first_panel, const unit* next, const typename F::elem* a, int m,
                  Emit&& emit) {
    const unit* b[NV];
    for (int v = 0; v < NV; v++) b[v] = w.panel(first_panel + v);
    const size_t lda = w.units(), stride = lda * LANES;
    const int blocks = (m + MR_MAX - 1) / MR_MAX;  // of nearly equal height, so that none is a sliver
    const int share = blocks > 1 ? (NV + blocks - 2) / (blocks - 1) : 0;  // panels to fetch in each block
    int row = 0;
    for (int block = 0; block < blocks; block++) {
        const int height = (m - row) / (blocks - block) + ((m - row) % (blocks - block) != 0);
        const int from = block && next ? (block - 1) * share : NV, to = std::min(from + share, NV);
        with_count<MR_MAX>(height, [&](auto mr) {
            constexpr int MR = decltype(mr)::value;
            __m512 acc[MR][NV];
            clear(acc);
            const auto* rows = (const unit*)a + row * lda;
            if (from < to) {
                dot<F, MR, NV>(acc, rows, lda, b, LANES, w.units(), [&](int k) {
                    for (int p = from; p < to; p++)
                        _mm_prefetch((const char*)(next + p * stride + (size_t)k * LANES), _MM_HINT_T1);
                });
            } else {
                dot<F, MR, NV>(acc, rows, lda, b, LANES, w.units(), [](int) {});
            }
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) emit(row + i, first_panel, acc[i]);
        });
        row += height;
    }
}

// Splits a matrix's panels into tasks of NV, with what is left over in tasks of REST.
template <int NV, int REST>
inline int panel_tasks(int panels) {
    return panels / NV + panels % NV / REST;
}

template <class F, int MR_MAX, int NV, int REST, class Emit>
inline void panels(const Matrix<F>& w, int task, int threads, const typename F::elem* a, int m, Emit&& emit) {
    const int whole = w.panel_count() / NV;
    if (task < whole) {
        // Tasks are claimed in turn, so this is what this thread most likely does next.
        const unit* next = task + threads < whole ? w.panel((task + threads) * NV) : nullptr;
        group<F, MR_MAX, NV>(w, task * NV, next, a, m, emit);
    } else {
        group<F, MR_MAX, REST>(w, whole * NV + (task - whole) * REST, nullptr, a, m, emit);
    }
}
