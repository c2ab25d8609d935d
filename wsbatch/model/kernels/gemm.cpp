// Products of activations with packed weights.
//
// Weights [N, K] are packed as [N / 16][K in units][16] (formats.cpp). A task takes a group of panels and runs all rows
// against it, so a weight is read from memory once a step however many rows there are. Few rows read it as it is stored,
// and are as fast as memory. For many, blocks of the summed dimension are unpacked once into a scratch that stays in the
// second-level cache, and blocks of rows are multiplied from there.
#pragma once
#include <vector>

#include "formats.cpp"

template <class F>
struct Matrix {
    const unit* panels;  // [panels][units][16]
    const float* bias;   // [N] or null
    int n, k;            // as in the model: out and in features

    int panel_count() const { return (n + LANES - 1) / LANES; }
    int units() const { return k / F::PACK; }
    const unit* panel(int p) const { return panels + (size_t)p * units() * LANES; }
    vec bias_at(int column) const { return bias ? load(bias + column) : all(0.0f); }
};

constexpr int GROUP = 4;                                  // panels of a task at most
constexpr int BLOCK_ROWS = 192;                           // rows whose sums are kept at a time
constexpr int BLOCK_UNITS = WIDTH == 16 ? 1024 : 256;     // of the operand: rows and panels stay in the first-level cache

struct Workspace {
    alignas(64) float sums[BLOCK_ROWS * GROUP * LANES];
    alignas(64) unit operand[GROUP * BLOCK_UNITS * LANES];
};

// Rows [0, m) of A against `count` neighbouring panels; emit(row, first, count, sums [count][16]) gets each row's. Meanwhile it fetches
// the group at `next` (or null), which is what this thread most likely multiplies next.
template <class F, class Emit>
inline void group(const Matrix<F>& w, int first, int count, const unit* next, const typename F::act* a, int m,
                  Workspace& space, Emit&& emit) {
    using Operand = typename F::Operand;
    const size_t apart = (size_t)w.units() * LANES;
    const int block_units = BLOCK_UNITS / F::STEPS, ld = count * LANES;
    const int parts = ((m + BLOCK_ROWS - 1) / BLOCK_ROWS) * ((w.units() + block_units - 1) / block_units);
    Ahead ahead;
    if (next) ahead = {(const char*)next, (const char*)(next + count * apart)};
    int number = 0;
    for (int row = 0; row < m; row += BLOCK_ROWS) {
        const int rows = std::min(BLOCK_ROWS, m - row);
        const bool unpacks = rows >= UNPACK_ROWS<F>;
        for (int from = 0; from < w.units(); from += block_units) {
            const int units = std::min(block_units, w.units() - from);
            const unit* stored = w.panel(first) + (size_t)from * LANES;
            const Panels panels = {&stored, 0, 0, apart, LANES, 1, units};
            const Sums sums = {space.sums, (size_t)ld, from == 0};
            const auto* acts = a + (size_t)row * w.k + from * F::PACK;
            const Ahead mine = next ? ahead.part(number, parts, 1) : ahead;
            if (unpacks) {
                unpack<F>(panels, count, space.operand);
                const unit* operand = space.operand;
                const int wide = units * F::STEPS;
                multiply<Operand>(acts, w.k, rows, {&operand, 0, 0, (size_t)wide * LANES, LANES, 1, wide}, count, sums,
                                  mine);
            } else {
                multiply<F>(acts, w.k, rows, panels, count, sums, mine);
            }
            number++;
        }
        for (int i = 0; i < rows; i++) emit(row + i, first, count, space.sums + (size_t)i * ld);
    }
}

// Splits a matrix's panels into tasks of `group` panels, the last with what is left over.
inline int panel_tasks(int panels, int group) { return (panels + group - 1) / group; }

// The rows against the panels of one task; `emit` as above.
template <class F, class Emit>
inline void task_of(const Matrix<F>& w, int task, int panels, int threads, const typename F::act* a, int m,
                    Workspace& space, Emit&& emit) {
    const int first = task * panels, count = std::min(panels, w.panel_count() - first);
    const int after = (task + threads) * panels;  // tasks are claimed in turn
    const unit* next = after + count <= w.panel_count() ? w.panel(after) : nullptr;
    group<F>(w, first, count, next, a, m, space, emit);
}
