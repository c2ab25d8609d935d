// Number formats, and the one inner product that everything is made of.
//
// A matrix B to be multiplied is stored in panels of 16 columns, [unit][16 columns]: a unit is 4 bytes along the summed
// dimension, one float or two bfloat16. So one load holds a unit of 16 columns, no horizontal sum is ever needed, and
// the layout is the same on every processor. Weights, cached keys and cached values all have this form.
//
// A format says what B is stored as, how a register full of units becomes numbers (`column`, in STEPS passes), and how
// those meet a row of A (`madd`). `Operand` is the format that B is multiplied in once it is unpacked.
#pragma once
#include <algorithm>
#include <limits>

#include "lanes.cpp"

using unit = int32_t;

INLINE vec widen(const uint16_t* from) {
    LANEWISE(vec, (fpart)(__builtin_convertvector(read<hpart>(from + i * WIDTH), ipart) << 16));
}

// Rounds to the nearest bfloat16, ties to even; a NaN stays one.
INLINE void narrow(uint16_t* to, const vec& x) {
    each<REGISTERS>([&](auto i) __attribute__((always_inline)) {
        const ipart bits = (ipart)x.p[i];
        const ipart rounded = bits + 0x7fff + ((bits >> 16) & 1);
        const ipart kept = x.p[i] == x.p[i] ? rounded : bits | 0x400000;
        const hpart half = __builtin_convertvector((kept >> 16) & 0xffff, hpart);
        std::memcpy(to + i * WIDTH, &half, sizeof(half));
    });
}

struct F32 {
    using elem = float;  // of B as stored
    using act = float;   // of A
    using Operand = F32;
    static constexpr int PACK = 1;   // elements in a unit
    static constexpr int STEPS = 1;  // passes over a unit
    static constexpr int ACTS = 1;   // acts that a pass takes
    template <int STEP>
    static INLINE fpart column(const unit* b) {
        return read<fpart>(b);
    }
    static INLINE fpart madd(fpart acc, const act* a, fpart b) { return fma_part(all_part(*a), b, acc); }
    static INLINE void put(elem* to, const vec& x) { ::store(to, x); }
    static INLINE void store(act* to, const vec& x) { ::store(to, x); }
    static INLINE vec get(const elem* from) { return load(from); }
};

// bfloat16 as storage: half the bytes of float, and float arithmetic. A stays float.
struct StoredBF16 {
    using elem = uint16_t;
    using act = float;
    using Operand = F32;
    static constexpr int PACK = 2, STEPS = 2, ACTS = 1;
    template <int STEP>
    static INLINE fpart column(const unit* b) {
        const ipart pair = read<ipart>(b);
        return (fpart)(STEP == 0 ? pair << 16 : pair & (int32_t)0xffff0000);
    }
    static INLINE fpart madd(fpart acc, const act* a, fpart b) { return fma_part(all_part(*a), b, acc); }
    static INLINE void put(elem* to, const vec& x) { narrow(to, x); }
    static INLINE void store(act* to, const vec& x) { ::store(to, x); }
    static INLINE vec get(const elem* from) { return widen(from); }
};

#ifdef __AVX512BF16__
// bfloat16 that the processor multiplies itself, two products to a lane.
struct NativeBF16 {
    using elem = uint16_t;
    using act = uint16_t;
    using Operand = NativeBF16;
    static constexpr int PACK = 2, STEPS = 1, ACTS = 2;
    template <int STEP>
    static INLINE fpart column(const unit* b) {
        return read<fpart>(b);
    }
    static INLINE fpart madd(fpart acc, const act* a, fpart b) {
        const __m512i pair = _mm512_set1_epi32(read<unit>(a));
        return (fpart)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pair, (__m512bh)b);
    }
    static INLINE void put(elem* to, const vec& x) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x.p[0]));
    }
    static INLINE void store(act* to, const vec& x) { put(to, x); }
    static INLINE vec get(const elem* from) { return widen(from); }
};
#endif

// Sums of 16 columns that the registers hold at a time, beside what else an inner product needs there. A format that is
// taken apart on the way needs more of them.
#if defined(__AVX512F__)
template <class F>
constexpr int SUMS = 24;
#elif defined(__AVX2__) || defined(__aarch64__)
template <class F>
constexpr int SUMS = F::STEPS == 1 ? 6 : 4;
#else
template <class F>
constexpr int SUMS = 2;
#endif
template <class F>
constexpr int TALLEST = std::min(8, SUMS<F>);  // rows of a tile at most
template <class F>
constexpr int WIDEST = std::min(4, SUMS<F>);  // and panels
// Rows from which on B is better unpacked once for all of them. Thirty-two wide registers have room to take it apart
// again and again, hidden behind the products.
template <class F>
constexpr int UNPACK_ROWS = F::STEPS == 1 || WIDTH == 16 ? std::numeric_limits<int>::max() : 16;

constexpr int FETCH_UNITS = 16;

// Memory to fetch into the second-level cache meanwhile, a few lines every FETCH_UNITS units.
struct Ahead {
    const char *line = nullptr, *end = nullptr;
    int lines = 0;  // at a time
    INLINE void fetch() {
        for (int i = 0; i < lines && line < end; i++, line += 64) __builtin_prefetch(line, 0, 2);
    }
    // The part `number` of `parts`, to fetch during `units` units.
    Ahead part(int number, int parts, int units) const {
        const size_t whole = (end - line) / 64;
        const size_t from = whole * number / parts, to = whole * (number + 1) / parts;
        const int times = (units + FETCH_UNITS - 1) / FETCH_UNITS;
        return {line + from * 64, line + to * 64, (int)((to - from + times - 1) / times)};
    }
};

// Where panels of B lie. The summed dimension comes in `runs` of `units` units each: unit k of panel v in run r is at
// starts[r * by_run + v * by_panel] + v * apart + k * step.
struct Panels {
    const unit* const* starts;
    int by_run, by_panel;
    size_t apart, step;
    int runs, units;
    INLINE const unit* at(int run, int v) const { return starts[run * by_run + v * by_panel] + v * apart; }
};

// Sums [rows][panels][16], rows `ld` floats apart; `fresh`: they start at 0.
struct Sums {
    float* at;
    size_t ld;
    bool fresh;
};

// The sum over k of a[m][k] * b[v][k], of ROWS rows of A (`lda` acts apart) against COUNT panels of B from `panel` on. Each
// sum is one chain in the order of k: neither ROWS, nor COUNT, nor where k is cut changes a bit of it.
template <class F, int ROWS, int COUNT>
__attribute__((noinline)) void tile(const typename F::act* a, size_t lda, const Panels& b, int panel, const Sums& sums,
                                    Ahead ahead) {
    constexpr int COLUMNS = COUNT * REGISTERS;  // registers full of them
    fpart acc[ROWS][COLUMNS];
    each<ROWS>([&](auto m) __attribute__((always_inline)) {
        each<COLUMNS>([&](auto c) __attribute__((always_inline)) {
            acc[m][c] = sums.fresh ? fpart{} : read<fpart>(sums.at + m * sums.ld + c * WIDTH);
        });
    });
    const size_t step = b.step;
    for (int run = 0; run < b.runs; run++) {
        const unit* from[COUNT];
        each<COUNT>([&](auto v) __attribute__((always_inline)) { from[v] = b.at(run, panel + v); });
        for (int k = 0; k < b.units; k++) {
            if (k % FETCH_UNITS == 0) ahead.fetch();
            each<F::STEPS>([&](auto s) __attribute__((always_inline)) {
                fpart column[COLUMNS];
                each<COLUMNS>([&](auto c) __attribute__((always_inline)) {
                    const unit* at = from[c / REGISTERS] + k * step + c % REGISTERS * WIDTH;
                    column[c] = F::template column<decltype(s)::value>(at);
                });
                each<ROWS>([&](auto m) __attribute__((always_inline)) {
                    const auto* x = a + m * lda + (k * F::STEPS + s) * F::ACTS;
                    each<COLUMNS>([&](auto c) __attribute__((always_inline)) {
                        acc[m][c] = F::madd(acc[m][c], x, column[c]);
                    });
                });
            });
        }
        a += (size_t)b.units * F::PACK;
    }
    each<ROWS>([&](auto m) __attribute__((always_inline)) {
        each<COLUMNS>([&](auto c) __attribute__((always_inline)) {
            std::memcpy(sums.at + m * sums.ld + c * WIDTH, &acc[m][c], sizeof(fpart));
        });
    });
}

// Calls f with `count` (1..MAX) as a compile-time number.
template <int MAX, class Call>
INLINE void with_count(int count, Call&& f) {
    if constexpr (MAX > 1) {
        if (count < MAX) return with_count<MAX - 1>(count, f);
    }
    f(std::integral_constant<int, MAX>());
}

// The same for any number of rows and panels, in tiles. Few rows take more panels at a time, and so have enough chains to
// keep the multipliers busy.
template <class F>
void multiply(const typename F::act* a, size_t lda, int rows, const Panels& b, int count, const Sums& sums,
              const Ahead& ahead = {}) {
    int wide = std::clamp(SUMS<F> / std::min(rows, TALLEST<F>), 1, std::min(WIDEST<F>, count));
    if (count % wide && count % (wide + 1) == 0 && SUMS<F> % (wide + 1) == 0) wide++;  // so that none is left over
    const int tall = std::min(SUMS<F> / wide, TALLEST<F>), blocks = (rows + tall - 1) / tall;
    const int tiles = blocks * ((count + wide - 1) / wide);
    int number = 0;
    for (int v = 0; v < count; v += wide) {
        for (int block = 0, row = 0; block < blocks; block++) {
            // of nearly equal height, so that none is a sliver
            const int height = (rows - row + blocks - block - 1) / (blocks - block);
            // the first tile waits for memory itself
            const Ahead mine = number ? ahead.part(number - 1, tiles - 1, b.runs * b.units) : Ahead();
            const Sums to = {sums.at + row * sums.ld + v * LANES, sums.ld, sums.fresh};
            with_count<WIDEST<F>>(std::min(wide, count - v), [&](auto nv) {
                with_count<TALLEST<F>>(height, [&](auto mr) {
                    if constexpr (mr * nv <= SUMS<F>) tile<F, mr, nv>(a + row * lda, lda, b, v, to, mine);
                });
            });
            row += height;
            number++;
        }
    }
}

// B as its Operand, [panel][unit][16], for rows so many that they would take the same units apart again and again.
template <class F>
inline void unpack(const Panels& b, int count, unit* to) {
    for (int v = 0; v < count; v++) {
        for (int run = 0; run < b.runs; run++) {
            const unit* from = b.at(run, v);
            for (int k = 0; k < b.units; k++, from += b.step) {
                each<F::STEPS>([&](auto s) __attribute__((always_inline)) {
                    each<REGISTERS>([&](auto i) __attribute__((always_inline)) {
                        const fpart numbers = F::template column<decltype(s)::value>(from + i * WIDTH);
                        std::memcpy(to + i * WIDTH, &numbers, sizeof(numbers));
                    });
                    to += LANES;
                });
            }
        }
    }
}
