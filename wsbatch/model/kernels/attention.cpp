// Attention of ragged rows over a paged pool: decodes and prefill chunks through one routine.
//
// The pool of a layer is [blocks][Hkv][keys, values][block_tokens * D]. Keys lie in tiles of 16 tokens as panels
// [D in units][16 tokens]; values as [token in units][D]: both are the B side of `dot`. A job is the queries of a few
// neighbouring tokens, all query heads of one KV head (so KV is read once for its group), over a range of the row's
// tokens, with online softmax (Milakov & Gimelshein 2018; Dao et al. 2022). Long ranges are split among jobs, and the
// last to finish merges the parts.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <vector>

#include "vector.cpp"

struct Shape {
    int q_heads, kv_heads, head_dim, block_tokens;
    float scale;
    int group() const { return q_heads / kv_heads; }
};

struct Row {
    int first;  // flat index of its first new token
    int count;  // new tokens
    int start;  // position of the first
    const int32_t* blocks;
};

struct Job {
    int row, head;
    int token, tokens;      // queries: offset within the row's new tokens, and how many
    int kv_begin, kv_end;   // positions; begin is a multiple of 16
    int split;              // -1 for a whole job
    int part, first_part, parts;
    double cost;
};

constexpr int MAX_QUERIES = 64;      // query rows (tokens x heads of the group) in a job
constexpr int TILE_QUERIES = 30;      // what a prefill tile aims at: five blocks of 6
constexpr int SCORES = 4096;          // scores kept at a time: 8 x 512, 32 x 128 or 64 x 64
constexpr int SPLIT_TOKENS = 128;    // a part is not shorter than this
// The peak of no scores at all. Were it a number, scores that are all -inf would pass for the average of the values.
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

template <class F>
struct Scratch {
    alignas(64) float scores[SCORES];
    alignas(64) typename F::elem weights[SCORES];
    std::vector<float> out;  // [queries, D]
    float peak[MAX_QUERIES], sum[MAX_QUERIES];
};

// The jobs of one step, the same for every layer with the same window (0: none).
struct Plan {
    std::vector<Job> jobs;
    std::deque<std::atomic<int>> finished;  // parts done, by split; back at 0 after each layer
    std::vector<float> parts;               // [part][MAX_QUERIES * (D + 2)]: weighted sums, peaks, sums
};

inline void make_plan(Plan& plan, const std::vector<Row>& rows, const Shape& s, int window, int threads) {
    auto& jobs = plan.jobs;
    jobs.clear();
    double total = 0;
    const int tile = std::max(1, TILE_QUERIES / s.group());
    for (int r = 0; r < (int)rows.size(); r++) {
        for (int token = 0; token < rows[r].count; token += tile) {
            const int tokens = std::min(tile, rows[r].count - token);
            const int position = rows[r].start + token;
            const int begin = window ? std::max(0, position - window + 1) / LANES * LANES : 0;
            const int end = position + tokens;
            // A short job is bound by memory: fewer than 8 query rows cost as much as 8.
            const double cost = (double)(end - begin) * std::max(8, tokens * s.group());
            for (int head = 0; head < s.kv_heads; head++) {
                jobs.push_back({r, head, token, tokens, begin, end, -1, 0, 0, 1, cost});
                total += cost;
            }
        }
    }
    int splits = 0, parts = 0;
    const double limit = total / (4 * threads);
    const size_t whole = jobs.size();
    for (size_t i = 0; i < whole && threads > 1; i++) {
        const int length = jobs[i].kv_end - jobs[i].kv_begin;
        const int wanted = (int)std::min(std::ceil(jobs[i].cost / limit), (double)(length / SPLIT_TOKENS));
        if (wanted < 2) continue;
        const int step = (length / wanted + LANES - 1) / LANES * LANES;
        const int count = (length + step - 1) / step;
        const Job job = jobs[i];
        for (int part = 0; part < count; part++) {
            Job piece = job;
            piece.kv_begin = job.kv_begin + part * step;
            piece.kv_end = std::min(job.kv_end, piece.kv_begin + step);
            piece.split = splits;
            piece.part = parts + part;
            piece.first_part = parts;
            piece.parts = count;
            piece.cost = job.cost / count;
            if (part == 0) {
                jobs[i] = piece;
            } else {
                jobs.push_back(piece);
            }
        }
        splits++;
        parts += count;
    }
    // The longest first, so that threads end together.
    std::stable_sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.cost > b.cost; });
    while ((int)plan.finished.size() < splits) plan.finished.emplace_back(0);
    const size_t floats = (size_t)parts * MAX_QUERIES * (s.head_dim + 2);
    if (plan.parts.size() < floats) plan.parts.resize(floats);
}

template <class F>
class Attention {
  public:
    Attention(const Shape& shape, const std::vector<Row>& rows, Plan& plan, int window)
        : s_(shape), rows_(rows), plan_(plan), window_(window) {}

    // q: [Hkv][total][group][D]; pool: this layer's; out: [total][Hq * D].
    void run(int index, const typename F::elem* q, int total, const typename F::elem* pool, typename F::elem* out,
             Scratch<F>& scratch) const {
        const Job& job = plan_.jobs[index];
        const Row& row = rows_[job.row];
        const int g = s_.group(), d = s_.head_dim, queries = job.tokens * g, units = d / F::PACK;
        const size_t tile = (size_t)LANES * d, half = (size_t)s_.block_tokens * d;
        const int wide = (queries <= 8 ? 512 : queries <= 32 ? 128 : 64), tiles_wide = wide / LANES;
        const auto* a = (const unit*)(q + ((size_t)job.head * total + row.first + job.token) * g * d);
        scratch.out.resize((size_t)MAX_QUERIES * d);
        std::fill_n(scratch.out.begin(), (size_t)queries * d, 0.0f);
        std::fill_n(scratch.peak, queries, NOTHING);
        std::fill_n(scratch.sum, queries, 0.0f);
        const unit *keys[SCORES / 8 / LANES], *values[SCORES / 8 / LANES];
        for (int begin = job.kv_begin; begin < job.kv_end; begin += wide) {
            const int tiles = (std::min(wide, job.kv_end - begin) + LANES - 1) / LANES;
            for (int t = 0; t < tiles; t++) {
                const int token = begin + t * LANES;
                const size_t block = row.blocks[token / s_.block_tokens];
                const auto* at = pool + (block * s_.kv_heads + job.head) * 2 * half;
                keys[t] = (const unit*)(at + token % s_.block_tokens / LANES * tile);
                values[t] = (const unit*)(at + half + token % s_.block_tokens / LANES * tile);
            }
            score(a, units, queries, keys, tiles, wide, scratch.scores);
            soften(job, row, begin, tiles, wide, queries, scratch);
            for (int v = 0; v < d / LANES; v += 4) {
                with_count<4>(std::min(4, d / LANES - v),
                              [&](auto nv) { weigh<nv.value>(values, tiles, tiles_wide, v, queries, scratch); });
            }
        }
        finish(job, row, queries, out, scratch);
    }

  private:
    // scores[queries][wide] = q . k, four tiles of keys at a time.
    void score(const unit* a, int units, int queries, const unit* const* keys, int tiles, int wide,
               float* scores) const {
        for (int t = 0; t < tiles; t += 4) {
            with_count<4>(std::min(4, tiles - t), [&](auto nv) {
                constexpr int NV = nv.value;
                const unit* b[NV];
                for (int v = 0; v < NV; v++) b[v] = keys[t + v];
                for (int row = 0; row < queries; row += 6) {
                    with_count<6>(std::min(6, queries - row), [&](auto mr) {
                        constexpr int MR = mr.value;
                        __m512 acc[MR][NV];
                        clear(acc);
                        dot<F, MR, NV>(acc, a + (size_t)row * units, units, b, LANES, units, [](int) {});
#pragma GCC unroll 8
                        for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
                            for (int v = 0; v < NV; v++)
                                _mm512_store_ps(scores + (row + i) * wide + (t + v) * LANES, acc[i][v]);
                    });
                }
            });
        }
    }

    // Scores to weights 2^(score - peak); sums so far are scaled to the new peak.
    void soften(const Job& job, const Row& row, int begin, int tiles, int wide, int queries,
                Scratch<F>& scratch) const {
        const __m512 scale = _mm512_set1_ps(s_.scale * 1.4426950408889634f);
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int r = 0; r < queries; r++) {
            const int position = row.start + job.token + r / s_.group();
            const int last = std::min(position, job.kv_end - 1) - begin;
            const int first = window_ ? position - window_ + 1 - begin : -begin;
            const bool masked = first > 0 || last < tiles * LANES - 1;
            float* scores = scratch.scores + r * wide;
            auto seen = [&](int t) -> __mmask16 {
                if (!masked) return 0xffff;
                const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(t * LANES));
                return _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(last)) &
                       _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(first));
            };
            __m512 top = _mm512_set1_ps(scratch.peak[r]);
            for (int t = 0; t < tiles; t++) {
                const __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + t * LANES), scale);
                _mm512_store_ps(scores + t * LANES, x);
                top = _mm512_mask_max_ps(top, seen(t), top, x);
            }
            const float peak = _mm512_reduce_max_ps(top);
            __m512 sum = _mm512_setzero_ps();
            auto* weights = scratch.weights + r * wide;
            for (int t = 0; t < tiles; t++) {
                const __m512 x = _mm512_sub_ps(_mm512_load_ps(scores + t * LANES), _mm512_set1_ps(peak));
                const __m512 p = _mm512_maskz_mov_ps(seen(t), exp2_ps(x));
                sum = _mm512_add_ps(sum, p);
                F::store(weights + t * LANES, p);
            }
            const float old = scratch.peak[r];
            scratch.peak[r] = peak;
            if (peak == old) {
                scratch.sum[r] += _mm512_reduce_add_ps(sum);
                continue;
            }
            const float shrink = _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(old - peak)));
            scratch.sum[r] = scratch.sum[r] * shrink + _mm512_reduce_add_ps(sum);
            float* out = scratch.out.data() + (size_t)r * s_.head_dim;
            for (int i = 0; i < s_.head_dim; i += LANES)
                _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), _mm512_set1_ps(shrink)));
        }
    }

    // out[queries][16 v ..] += weights . values
    template <int NV>
    void weigh(const unit* const* values, int tiles, int tiles_wide, int v, int queries, Scratch<F>& scratch) const {
        const int d = s_.head_dim;
        constexpr int UNITS = LANES / F::PACK;
        const int lda = tiles_wide * UNITS;
        for (int row = 0; row < queries; row += 6) {
            with_count<6>(std::min(6, queries - row), [&](auto mr) {
                constexpr int MR = mr.value;
                __m512 acc[MR][NV];
                float* out = scratch.out.data() + (size_t)row * d + v * LANES;
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < NV; j++) acc[i][j] = _mm512_loadu_ps(out + i * d + j * LANES);
                const unit* a = (const unit*)scratch.weights + row * lda;
                for (int t = 0; t < tiles; t++) {
                    const unit* b[NV];
#pragma GCC unroll 4
                    for (int j = 0; j < NV; j++) b[j] = values[t] + (v + j) * LANES;
                    dot<F, MR, NV>(acc, a + t * UNITS, lda, b, d, UNITS, [](int) {});
                }
#pragma GCC unroll 8
                for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < NV; j++) _mm512_storeu_ps(out + i * d + j * LANES, acc[i][j]);
            });
        }
    }

    void write(const Job& job, const Row& row, int r, const float* sums, float sum, typename F::elem* out) const {
        const int d = s_.head_dim, token = row.first + job.token + r / s_.group();
        auto* to = out + ((size_t)token * s_.q_heads + job.head * s_.group() + r % s_.group()) * d;
        const __m512 by = _mm512_set1_ps(1.0f / sum);
        for (int i = 0; i < d; i += LANES) F::store(to + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), by));
    }

    void finish(const Job& job, const Row& row, int queries, typename F::elem* out, Scratch<F>& scratch) const {
        const int d = s_.head_dim;
        if (job.split < 0) {
            for (int r = 0; r < queries; r++)
                write(job, row, r, scratch.out.data() + (size_t)r * d, scratch.sum[r], out);
            return;
        }
        const size_t stride = (size_t)MAX_QUERIES * (d + 2);
        float* mine = plan_.parts.data() + job.part * stride;
        std::copy_n(scratch.out.begin(), (size_t)queries * d, mine);
        std::copy_n(scratch.peak, queries, mine + MAX_QUERIES * d);
        std::copy_n(scratch.sum, queries, mine + MAX_QUERIES * (d + 1));
        auto& finished = plan_.finished[job.split];
        if (finished.fetch_add(1, std::memory_order_acq_rel) != job.parts - 1) return;
        finished.store(0, std::memory_order_relaxed);  // for the next layer
        const float* all = plan_.parts.data() + (size_t)job.first_part * stride;
        for (int r = 0; r < queries; r++) {
            float peak = NOTHING, sum = 0;
            for (int p = 0; p < job.parts; p++) peak = std::max(peak, all[p * stride + MAX_QUERIES * d + r]);
            float* merged = scratch.out.data() + (size_t)r * d;
            std::fill_n(merged, d, 0.0f);
            for (int p = 0; p < job.parts; p++) {
                const float* part = all + p * stride;
                const float w = std::exp2(std::max(part[MAX_QUERIES * d + r] - peak, -126.0f));
                sum += w * part[MAX_QUERIES * (d + 1) + r];
                for (int i = 0; i < d; i++) merged[i] += w * part[(size_t)r * d + i];
            }
            write(job, row, r, merged, sum, out);
        }
    }

    const Shape& s_;
    const std::vector<Row>& rows_;
    Plan& plan_;
    const int window_;
};
