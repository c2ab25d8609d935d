// Choosing a token from one row of logits: `wsbatch/model/sampling.py` says what is chosen, this does it in a few passes
// over the vocabulary, in double precision, without sorting it.
//
// A top-k or top-p set is found among candidates. For top-k those are the logits that reach the k-th largest of the
// blocks' maxima: at least k do. For top-p, no token whose weight is under (1 - p) * total / V is needed: all of them
// together weigh less than what the set leaves out. Of the candidates, halves are taken or left as a whole by their
// weight (a selection weighted by mass; see Cormen et al., "Introduction to Algorithms", problem 9-2).
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.cpp"

extern "C" {
struct Choice {
    const float* logits;  // [vocab]
    int32_t vocab;
    int32_t top_k;        // 0: no limit
    double temperature;   // 0: the largest logit
    double top_p, noise;
    int64_t id;           // out: -1 where the largest logit is not finite, or one is NaN
    int32_t logprobs;     // how many of the most likely; negative: none, and no `own`
    float own;            // out: the log probability of `id`
    int32_t* top_ids;     // out: [logprobs], the most likely first
    float* top_logprobs;  // out: [logprobs]
};
}

constexpr int DOUBLES = WIDTH / 2;  // in a register
typedef double dpart __attribute__((vector_size(DOUBLES * 8)));
typedef int64_t lpart __attribute__((vector_size(DOUBLES * 8)));
typedef float fhalf __attribute__((vector_size(DOUBLES * 4)));

// 2^x for x <= 0, and 0 below -1000: a Taylor polynomial of degree 13, relative error under 1e-15.
INLINE dpart exp2_part(dpart x) {
    const dpart magic = 6755399441055744.0 - dpart{};  // 1.5 * 2^52
    const dpart whole = (x + magic) - magic, t = (x - whole) * 0.6931471805599453;
    dpart p = 1.0 / 6227020800 - dpart{};
    for (double factor : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                          1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
        p = p * t + factor;
    const dpart power = (dpart)(((lpart)(x + magic) + 1023) << 52);
    return x > -1000.0 ? p * power : dpart{};  // NaN: 0
}

class Chooser {
  public:
    // Makes room for rows of so many logits; `choose` itself allocates nothing.
    void prepare(int vocab) {
        const size_t count = (vocab + BLOCK - 1) / BLOCK;
        maxima_.reserve(count);
        order_.reserve(count);
        sums_.reserve(count);
        weights_.reserve(count * BLOCK);
        candidates_.reserve(vocab);
    }

    void choose(Choice& choice) {
        logits_ = choice.logits;
        vocab_ = choice.vocab;
        choice.id = highest();
        if (choice.id < 0) return;
        peak_ = logits_[choice.id];
        if (choice.temperature > 0) choice.id = draw(choice);
        if (choice.logprobs >= 0) explain(choice);
    }

  private:
    static constexpr int BLOCK = 64;  // logits whose largest, or whose weight, is known

    struct Candidate {
        float logit;
        int32_t id;
        double weight;
        // the more likely first, of equals the lower id
        bool operator<(const Candidate& other) const {
            return logit != other.logit ? logit > other.logit : id < other.id;
        }
    };

    int blocks() const { return (vocab_ + BLOCK - 1) / BLOCK; }

    // The lowest id among the largest logits, -1 where that is not finite or one is NaN. Fills `maxima_`.
    int64_t highest() {
        maxima_.resize(blocks());
        vec broken = all(0.0f);
        float top = -std::numeric_limits<float>::infinity();
        int best = 0;
        for (int block = 0; block < blocks(); block++) {
            const int begin = block * BLOCK, end = std::min(vocab_, begin + BLOCK);
            float most = -std::numeric_limits<float>::infinity();
            if (end - begin == BLOCK) {
                vec tops = load(logits_ + begin);
                for (int i = 0; i < BLOCK; i += LANES) {
                    const vec x = load(logits_ + begin + i);
                    tops = max(tops, x);
                    broken = select(x != x, all(1.0f), broken);
                }
                most = ::highest(tops);
            } else {
                for (int i = begin; i < end; i++) {
                    most = std::max(most, logits_[i]);
                    if (logits_[i] != logits_[i]) return -1;
                }
            }
            maxima_[block] = most;
            if (most > top) top = most, best = block;
        }
        if (any(broken != all(0.0f)) || !std::isfinite(top)) return -1;
        return std::find(logits_ + (size_t)best * BLOCK, logits_ + vocab_, top) - logits_;
    }

    // exp((logit - peak) / temperature) of each, and the sum by block. Returns the sum of all.
    double weigh(double temperature) {
        weights_.resize((size_t)blocks() * BLOCK);
        const double by = 1.4426950408889634 / temperature, peak = peak_;
        double total = 0;
        for (int block = 0; block < blocks(); block++) {
            const int begin = block * BLOCK, end = std::min(vocab_, begin + BLOCK);
            float padded[BLOCK];
            const float* from = logits_ + begin;
            if (end - begin < BLOCK) {
                std::fill(std::copy(from, logits_ + end, padded), padded + BLOCK,
                          -std::numeric_limits<float>::infinity());
                from = padded;
            }
            for (int i = 0; i < BLOCK; i += DOUBLES) {
                const dpart x = (__builtin_convertvector(read<fhalf>(from + i), dpart) - peak) * by;
                const dpart weight = exp2_part(x);
                std::memcpy(&weights_[begin + i], &weight, sizeof(weight));
            }
            total += block_sum(block, [](int) { return true; });
        }
        return total;
    }

    // The weight of a block's tokens that are kept.
    template <class Keeps>
    double block_sum(int block, Keeps&& keeps) const {
        double lanes[8] = {};
        for (int i = 0; i < BLOCK; i += 8)
            for (int lane = 0; lane < 8; lane++) {
                const int id = block * BLOCK + i + lane;
                lanes[lane] += keeps(id) ? weights_[id] : 0.0;
            }
        for (int n = 4; n; n /= 2)
            for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
        return lanes[0];
    }

    int64_t draw(const Choice& choice) {
        const double total = weigh(choice.temperature);
        const bool by_count = choice.top_k > 0 && choice.top_k < vocab_;
        if (!by_count && !(choice.top_p < 1)) return invert(choice.noise, [](int) { return true; });
        const Candidate last = by_count ? last_of_count(choice) : last_of_share(choice.top_p, total);
        return invert(choice.noise, [&](int id) {
            return id < vocab_ && (logits_[id] > last.logit || (logits_[id] == last.logit && id <= last.id));
        });
    }

    // The first token, in id order, at which the kept weights pass `noise` of their sum.
    template <class Keeps>
    int64_t invert(double noise, Keeps&& keeps) {
        sums_.resize(blocks());
        double total = 0;
        for (int block = 0; block < blocks(); block++) total += sums_[block] = block_sum(block, keeps);
        const double target = noise * total;
        // Where rounding leaves the sum short of the target, the last block and token with a weight are meant.
        int passing = 0;
        double before = 0, next = 0;
        for (int block = 0; block < blocks() && next <= target; block++) {
            if (!(sums_[block] > 0)) continue;
            passing = block, before = next;
            next += sums_[block];
        }
        int64_t found = -1;
        for (int id = passing * BLOCK; id < std::min(vocab_, (passing + 1) * BLOCK) && before <= target; id++) {
            if (!keeps(id) || !(weights_[id] > 0)) continue;
            found = id;
            before += weights_[id];
        }
        return found;
    }

    // The logits that reach the k-th largest of the blocks' maxima, among them the k largest of all.
    void gather_count(int k) {
        float least = -std::numeric_limits<float>::infinity();
        if (k <= blocks()) {
            order_ = maxima_;
            std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<float>());
            least = order_[k - 1];
        }
        candidates_.clear();
        for (int block = 0; block < blocks(); block++) {
            if (maxima_[block] < least) continue;
            for (int id = block * BLOCK; id < std::min(vocab_, (block + 1) * BLOCK); id++)
                if (logits_[id] >= least) candidates_.push_back({logits_[id], id, 0.0});
        }
    }

    // The last, in order of likelihood, of the top-k and then top-p set.
    Candidate last_of_count(const Choice& choice) {
        gather_count(choice.top_k);
        const auto end = candidates_.begin() + choice.top_k;
        std::nth_element(candidates_.begin(), end - 1, candidates_.end());
        if (!(choice.top_p < 1)) return *(end - 1);
        candidates_.erase(end, candidates_.end());
        double total = 0;
        for (auto& candidate : candidates_) total += candidate.weight = weights_[candidate.id];
        return last_of_mass(choice.top_p * total);
    }

    Candidate last_of_share(double share, double total) {
        const double least = (1 - share) * total / vocab_;
        candidates_.clear();
        for (int block = 0; block < blocks(); block++)
            for (int id = block * BLOCK; id < std::min(vocab_, (block + 1) * BLOCK); id++)
                if (weights_[id] >= least) candidates_.push_back({logits_[id], id, weights_[id]});
        return last_of_mass(share * total);
    }

    // The last of the smallest set of candidates, the most likely first, that weighs `target`.
    Candidate last_of_mass(double target) {
        auto begin = candidates_.begin(), end = candidates_.end();
        double before = 0;
        while (end - begin > 32) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end);
            double mass = 0;
            for (auto at = begin; at < middle; ++at) mass += at->weight;
            if (before + mass >= target) {
                end = middle;
            } else {
                before += mass;
                begin = middle;
            }
        }
        std::sort(begin, end);
        for (auto at = begin; at + 1 < end; ++at) {
            before += at->weight;
            if (before >= target) return *at;
        }
        return *(end - 1);
    }

    void explain(Choice& choice) {
        const double norm = std::log(weigh(1.0));
        auto logprob = [&](float logit) {
            return std::max((float)((double)logit - peak_ - norm), std::numeric_limits<float>::lowest());
        };
        choice.own = logprob(logits_[choice.id]);
        const int count = std::min(choice.logprobs, vocab_);
        if (!count) return;
        gather_count(count);
        std::partial_sort(candidates_.begin(), candidates_.begin() + count, candidates_.end());
        for (int i = 0; i < count; i++) {
            choice.top_ids[i] = candidates_[i].id;
            choice.top_logprobs[i] = logprob(candidates_[i].logit);
        }
    }

    const float* logits_ = nullptr;
    int vocab_ = 0;
    float peak_ = 0;
    std::vector<float> maxima_, order_;   // by block
    std::vector<double> weights_, sums_;  // by id, rounded up to whole blocks with 0; by block
    std::vector<Candidate> candidates_;
};
