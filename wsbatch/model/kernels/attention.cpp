// Attention of ragged rows over a paged pool: decodes and prefill chunks through one routine.
//
// The pool of a layer is [blocks][Hkv][keys, values][block_tokens * D]. Keys lie in tiles of 16 tokens as panels
// [D in units][16 tokens]; values as [token in units][D]: both are panels (formats.cpp). A job is the queries of a few
// neighbouring tokens, all query heads of one KV head (so KV is read once for its group), over a range of the row's
// tokens, with online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
//
// A token's result is the same bits whoever shares the step, however its prompt was cut, and on any number of threads:
// where a part begins, and the order in which scores, weights and parts are added, depend on positions alone. Long ranges
// are split among jobs at the parts, and the last job to finish adds them up.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <vector>

#include "formats.cpp"

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
    int kv_begin, kv_end;   // positions; begin is a multiple of WIDE
    int split;              // -1 for a whole job
    int part, first_part, parts;
    double cost;
};

constexpr int MAX_QUERIES = 64;   // query rows (tokens x heads of the group) in a job
constexpr int TILE_QUERIES = 30;  // what a prefill tile aims at
constexpr int WIDE = 128;         // positions whose scores are kept at a time
constexpr int PART = 256;         // positions of a part
// The peak of no scores at all. Were it a number, scores that are all -inf would pass for the average of the values.
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Online softmax over some positions: the weighted sum of the values, the largest score, the sum of the weights.
struct Partial {
    std::vector<float> out;  // [queries, D]
    float peak[MAX_QUERIES], sum[MAX_QUERIES];

    void clear(int queries, int d) {
        out.assign((size_t)queries * d, 0.0f);
        std::fill_n(peak, queries, NOTHING);
        std::fill_n(sum, queries, 0.0f);
    }
};

// Memory of one thread. All of it is there before a step begins: a failed allocation in the middle of one would leave the
// other threads waiting.
template <class F>
struct Scratch {
    explicit Scratch(int d) : operand((size_t)WIDE * d) {
        for (auto* partial : {&part, &total}) partial->out.reserve((size_t)MAX_QUERIES * d);
    }
    alignas(64) float scores[MAX_QUERIES * WIDE];
    alignas(64) typename F::act weights[MAX_QUERIES * WIDE];
    std::vector<float> operand;  // [WIDE, D]: keys or values, unpacked
    Partial part, total;
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
            const int begin = window ? std::max(0, position - window + 1) / WIDE * WIDE : 0;
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
        const Job job = jobs[i];
        const int first = job.kv_begin / PART, count = (job.kv_end - 1) / PART - first + 1;
        if (count < 2 || job.cost <= limit) continue;
        for (int part = 0; part < count; part++) {
            Job piece = job;
            piece.kv_begin = std::max(job.kv_begin, (first + part) * PART);
            piece.kv_end = std::min(job.kv_end, (first + part + 1) * PART);
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
    using act = typename F::act;

  public:
    Attention(const Shape& shape, const std::vector<Row>& rows, Plan& plan, int window)
        : s_(shape), rows_(rows), plan_(plan), window_(window) {}

    // q: [Hkv][total][group][D]; pool: this layer's; out: [total][Hq * D].
    void run(int index, const act* q, int total, const typename F::elem* pool, act* out, Scratch<F>& scratch) const {
        const Job& job = plan_.jobs[index];
        const Row& row = rows_[job.row];
        const int queries = job.tokens * s_.group();
        const act* a = q + ((size_t)job.head * total + row.first + job.token) * s_.group() * s_.head_dim;
        scratch.total.clear(queries, s_.head_dim);
        for (int from = job.kv_begin; from < job.kv_end;) {
            const int to = std::min(job.kv_end, (from / PART + 1) * PART);
            attend(job, row, from, to, a, queries, pool, scratch);
            from = to;
            if (job.split >= 0) return finish_split(job, row, queries, out, scratch);
            fold(scratch.total, scratch.part.out.data(), scratch.part.peak, scratch.part.sum, queries);
        }
        write(job, row, queries, scratch.total, out);
    }

  private:
    // One part: positions [from, to) of the row.
    void attend(const Job& job, const Row& row, int from, int to, const act* a, int queries,
                const typename F::elem* pool, Scratch<F>& scratch) const {
        const int d = s_.head_dim;
        const size_t tile = (size_t)LANES * d, half = (size_t)s_.block_tokens * d;
        const unit *keys[WIDE / LANES], *values[WIDE / LANES];
        scratch.part.clear(queries, d);
        for (int begin = from; begin < to; begin += WIDE) {
            const int tiles = (std::min(WIDE, to - begin) + LANES - 1) / LANES;
            for (int t = 0; t < tiles; t++) {
                const int token = begin + t * LANES;
                const size_t block = row.blocks[token / s_.block_tokens];
                const auto* at = pool + (block * s_.kv_heads + job.head) * 2 * half;
                keys[t] = (const unit*)(at + token % s_.block_tokens / LANES * tile);
                values[t] = (const unit*)(at + half + token % s_.block_tokens / LANES * tile);
            }
            product(a, d, queries, {keys, 0, 1, 0, LANES, 1, d / F::PACK}, tiles,
                    {scratch.scores, WIDE, true}, scratch);
            soften(job, row, begin, tiles, queries, scratch);
            product(scratch.weights, WIDE, queries, {values, 1, 0, LANES, (size_t)d, tiles, LANES / F::PACK},
                    d / LANES, {scratch.part.out.data(), (size_t)d, false}, scratch);
        }
    }

    // Keys and values are taken apart once where many queries meet them.
    void product(const act* a, size_t lda, int queries, const Panels& b, int count, const Sums& sums,
                 Scratch<F>& scratch) const {
        using Operand = typename F::Operand;
        if (queries < UNPACK_ROWS<F>)
            return multiply<F>(a, lda, queries, b, count, sums);
        auto* operand = (unit*)scratch.operand.data();
        unpack<F>(b, count, operand);
        const int units = b.runs * b.units * F::STEPS;
        const unit* start = operand;
        multiply<Operand>(a, lda, queries, {&start, 0, 0, (size_t)units * LANES, LANES, 1, units}, count, sums);
    }

    // Scores to weights 2^(score - peak); sums so far are scaled to the new peak.
    void soften(const Job& job, const Row& row, int begin, int tiles, int queries, Scratch<F>& scratch) const {
        const vec scale = all(s_.scale * 1.4426950408889634f), nothing = all(0.0f);
        Partial& part = scratch.part;
        for (int r = 0; r < queries; r++) {
            const int position = row.start + job.token + r / s_.group();
            const int last = std::min(position, job.kv_end - 1) - begin;
            const int first_seen = window_ ? position - window_ + 1 - begin : -begin;
            float* scores = scratch.scores + r * WIDE;
            act* weights = scratch.weights + r * WIDE;
            auto whole = [&](int t) { return t * LANES >= first_seen && (t + 1) * LANES - 1 <= last; };
            auto seen = [&](int t) {
                const ivec at = lane_numbers() + all(t * LANES);
                return (at <= all(last)) & (all(first_seen) <= at);
            };
            vec top = all(part.peak[r]);
            for (int t = 0; t < tiles; t++) {
                const vec x = load(scores + t * LANES) * scale;
                store(scores + t * LANES, x);
                top = whole(t) ? max(top, x) : select(seen(t), max(top, x), top);
            }
            const float old = part.peak[r], peak = highest(top);
            vec weight = nothing;
            for (int t = 0; t < tiles; t++) {
                vec p = exp2(load(scores + t * LANES) - all(peak));
                if (!whole(t)) p = select(seen(t), p, nothing);
                weight = weight + p;
                F::store(weights + t * LANES, p);
            }
            part.peak[r] = peak;
            if (peak == old) {
                part.sum[r] += sum(weight);
                continue;
            }
            const vec shrink = exp2(all(old - peak));
            part.sum[r] = part.sum[r] * first(shrink) + sum(weight);
            float* out = &part.out[(size_t)r * s_.head_dim];
            for (int i = 0; i < s_.head_dim; i += LANES) store(out + i, load(out + i) * shrink);
        }
    }

    // Adds one part to the total. Parts are always added one by one in their order, whichever threads computed them.
    void fold(Partial& total, const float* out, const float* peaks, const float* sums, int queries) const {
        const int d = s_.head_dim;
        for (int r = 0; r < queries; r++) {
            if (peaks[r] == NOTHING && sums[r] == 0) continue;  // the query sees nothing of this part
            const float peak = std::max(total.peak[r], peaks[r]);
            const float kept = std::exp2(std::max(total.peak[r] - peak, -126.0f));
            const float taken = std::exp2(std::max(peaks[r] - peak, -126.0f));
            total.peak[r] = peak;
            total.sum[r] = total.sum[r] * kept + sums[r] * taken;
            float* to = &total.out[(size_t)r * d];
            for (int i = 0; i < d; i += LANES)
                store(to + i, fma(load(to + i), all(kept), load(out + (size_t)r * d + i) * all(taken)));
        }
    }

    void write(const Job& job, const Row& row, int queries, const Partial& total, act* out) const {
        const int d = s_.head_dim, g = s_.group();
        for (int r = 0; r < queries; r++) {
            const int token = row.first + job.token + r / g;
            act* to = out + ((size_t)token * s_.q_heads + job.head * g + r % g) * d;
            const vec by = all(1.0f / total.sum[r]);
            for (int i = 0; i < d; i += LANES) F::store(to + i, load(&total.out[(size_t)r * d + i]) * by);
        }
    }

    // Keeps this part; who finishes the last one of a split adds them all up.
    void finish_split(const Job& job, const Row& row, int queries, act* out, Scratch<F>& scratch) const {
        const int d = s_.head_dim;
        const size_t stride = (size_t)MAX_QUERIES * (d + 2);
        float* mine = plan_.parts.data() + job.part * stride;
        std::copy_n(scratch.part.out.begin(), (size_t)queries * d, mine);
        std::copy_n(scratch.part.peak, queries, mine + MAX_QUERIES * d);
        std::copy_n(scratch.part.sum, queries, mine + MAX_QUERIES * (d + 1));
        auto& finished = plan_.finished[job.split];
        if (finished.fetch_add(1, std::memory_order_acq_rel) != job.parts - 1) return;
        finished.store(0, std::memory_order_relaxed);  // for the next layer
        for (int p = 0; p < job.parts; p++) {
            const float* part = plan_.parts.data() + (job.first_part + p) * stride;
            fold(scratch.total, part, part + MAX_QUERIES * d, part + MAX_QUERIES * (d + 1), queries);
        }
        write(job, row, queries, scratch.total, out);
    }

    const Shape& s_;
    const std::vector<Row>& rows_;
    Plan& plan_;
    const int window_;
};
