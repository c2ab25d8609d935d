// One step of a Llama-shaped model: from token ids to the most likely next token, all layers in one call.
//
// Llama, Mistral, Qwen2 and Qwen3 differ in biases, in norms on the heads and in sliding windows; all are here. Python
// gives the weights once (`create`) and a ragged batch each step (`step`). The residual stream is kept in float, what
// is multiplied in the model's own format.
#include <atomic>
#include <chrono>
#include <limits>
#include <new>

#include "gemm.cpp"
#include "layers.cpp"
#include "sampling.cpp"
#include "threads.cpp"

extern "C" {
struct Packed {
    const void* panels;
    const float* bias;
    int32_t n, k;
};
struct LayerWeights {
    Packed qkv, o, gate_up, down;
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
    int32_t window;
};
struct Config {
    int32_t threads, layers, hidden, q_heads, kv_heads, head_dim, block_tokens, total_blocks;
    float eps, scale;
    const void* embedding;  // [V, hidden]
    Packed head;
    const float *final_norm, *cos, *sin;
    void* pool;  // [layers][blocks][Hkv][2][block_tokens * D]
};
struct Batch {
    int32_t rows, tokens, samples, widest;
    const int64_t *token_ids, *positions, *sample_at;
    const int32_t *query_starts, *kv_lens, *block_tables;
    float* const* logits;  // [samples]: where a row's logits go, or null
    int64_t* best;         // [samples]
    uint8_t* broken;       // [rows], 0: becomes 1 where a key or a value of the row is not finite
    double* stage_ms;      // [4]: linears, attention, head, everything else
};
}

enum Part { LINEARS, ATTENTION, HEAD, OTHER, PARTS };
constexpr int STAGES_PER_LAYER = 8, ROWS_PER_TASK = 4;

class Runner {
  public:
    virtual ~Runner() = default;
    virtual void step(const Batch& batch) = 0;
    virtual void choose(Choice* choices, int count) = 0;
};

template <class F>
class Model : public Runner {
    using elem = typename F::elem;
    using act = typename F::act;

  public:
    Model(const Config& c, const LayerWeights* layers)
        : c_(c),
          layers_(layers, layers + c.layers),
          shape_{c.q_heads, c.kv_heads, c.head_dim, c.block_tokens, c.scale},
          team_(c.threads, c.layers * STAGES_PER_LAYER + 4),
          spaces_(c.threads),
          choosers_(c.threads) {
        scratch_.reserve(c.threads);
        for (int thread = 0; thread < c.threads; thread++) scratch_.emplace_back(c.head_dim);
        for (auto& layer : layers_)
            if (!plan_of(layer.window)) plans_.push_back({layer.window, std::make_unique<Plan>()});
    }

    void step(const Batch& batch) override {
        prepare(batch);
        auto last = std::chrono::steady_clock::now();
        team_.run([&](int thread) {
            int stage = 0;
            auto mark = [&](Part part) {
                if (thread) return;
                const auto now = std::chrono::steady_clock::now();
                batch.stage_ms[part] += std::chrono::duration<double, std::milli>(now - last).count();
                last = now;
            };
            embed(batch, stage);
            for (int i = 0; i < c_.layers; i++) layer(batch, i, thread, stage, mark);
            if (batch.samples) head(batch, thread, stage);
            mark(HEAD);
        });
        for (int s = 0; s < batch.samples; s++) batch.best[s] = winner(s);
    }

    void choose(Choice* choices, int count) override {
        for (auto& chooser : choosers_)
            for (int i = 0; i < count; i++) chooser.prepare(choices[i].vocab);
        team_.run([&](int thread) {
            team_.stage(0, count, [&](int i) { choosers_[thread].choose(choices[i]); });
        });
    }

  private:
    void prepare(const Batch& b) {
        rows_.resize(b.rows);
        for (int r = 0; r < b.rows; r++) {
            const int count = b.query_starts[r + 1] - b.query_starts[r];
            rows_[r] = {b.query_starts[r], count, b.kv_lens[r] - count, b.block_tables + (size_t)r * b.widest};
        }
        row_of_.resize(b.tokens);
        for (int r = 0; r < b.rows; r++) std::fill_n(row_of_.begin() + rows_[r].first, rows_[r].count, r);
        for (auto& [window, plan] : plans_) make_plan(*plan, rows_, shape_, window, team_.size());
        const size_t t = b.tokens, heads = c_.q_heads * c_.head_dim;
        fit(x_, t * c_.hidden);
        fit(normed_, t * c_.hidden);
        fit(qkv_, t * layers_[0].qkv.n);
        fit(q_, t * heads);
        fit(attended_, t * heads);
        fit(gated_, t * (layers_[0].gate_up.n / 2));
        fit(top_, (size_t)b.samples * team_.size() * LANES);
        fit(top_at_, (size_t)b.samples * team_.size() * LANES);
        samples_ = b.samples;
        std::fill_n(top_.begin(), top_.size(), -std::numeric_limits<float>::infinity());
        std::fill_n(top_at_.begin(), top_at_.size(), 0);
    }

    template <class V>
    static void fit(V& v, size_t size) {
        if (v.size() < size) v.resize(size);
    }

    Plan* plan_of(int window) {
        for (auto& [w, plan] : plans_)
            if (w == window) return plan.get();
        return nullptr;
    }

    static Matrix<F> matrix(const Packed& p) { return {(const unit*)p.panels, p.bias, p.n, p.k}; }

    // Runs task(first, end) over `count` rows, a few at a time.
    template <class Task>
    void by_rows(int& stage, int count, Task&& task) {
        team_.stage(stage++, (count + ROWS_PER_TASK - 1) / ROWS_PER_TASK, [&](int t) {
            task(t * ROWS_PER_TASK, std::min(count, (t + 1) * ROWS_PER_TASK));
        });
    }

    void embed(const Batch& b, int& stage) {
        by_rows(stage, b.tokens, [&](int from, int to) {
            for (int t = from; t < to; t++) {
                const elem* row = (const elem*)c_.embedding + (size_t)b.token_ids[t] * c_.hidden;
                for (int i = 0; i < c_.hidden; i += LANES)
                    store(&x_[(size_t)t * c_.hidden + i], F::get(row + i));
            }
        });
    }

    template <class Mark>
    void layer(const Batch& b, int index, int thread, int& stage, Mark&& mark) {
        const LayerWeights& w = layers_[index];
        const size_t hidden = c_.hidden;
        const int t = b.tokens;
        auto norm_rows = [&](const float* weight) {
            by_rows(stage, t, [&](int from, int to) {
                for (int i = from; i < to; i++) norm<F>(&x_[i * hidden], weight, hidden, c_.eps, &normed_[i * hidden]);
            });
        };
        norm_rows(w.attention_norm);
        mark(OTHER);
        product(stage, w.qkv, normed_.data(), t, thread, [&](int row, int column, const vec& value) {
            store(&qkv_[(size_t)row * w.qkv.n + column], value);
        });
        mark(LINEARS);
        elem* pool = (elem*)c_.pool + (size_t)index * c_.total_blocks * c_.kv_heads * 2 * c_.block_tokens * c_.head_dim;
        by_rows(stage, t, [&](int from, int to) {
            for (int i = from; i < to; i++) place(b, w, i, pool);
        });
        mark(OTHER);
        Plan& plan = *plan_of(w.window);
        const Attention<F> attention(shape_, rows_, plan, w.window);
        team_.stage(stage++, (int)plan.jobs.size(), [&](int job) {
            attention.run(job, q_.data(), t, pool, attended_.data(), scratch_[thread]);
        });
        mark(ATTENTION);
        auto add = [&](int row, int column, const vec& value) {
            float* to = &x_[row * hidden + column];
            store(to, load(to) + value);
        };
        product(stage, w.o, attended_.data(), t, thread, add);
        mark(LINEARS);
        norm_rows(w.mlp_norm);
        mark(OTHER);
        gate(stage, w.gate_up, t, thread);
        product(stage, w.down, gated_.data(), t, thread, add);
        mark(LINEARS);
    }

    template <class Emit>
    void product(int& stage, const Packed& packed, const act* a, int rows, int thread, Emit&& emit) {
        constexpr int panels = 3;
        const Matrix<F> w = matrix(packed);
        team_.stage(stage++, panel_tasks(w.panel_count(), panels), [&](int task) {
            task_of(w, task, panels, team_.size(), a, rows, spaces_[thread], [&](int row, int first, int count,
                                                                                         const float* sums) {
                for (int v = 0; v < count; v++) {
                    const int column = (first + v) * LANES;
                    emit(row, column, load(sums + v * LANES) + w.bias_at(column));
                }
            });
        });
    }

    // Panels of the gate and of the up projection alternate, so that silu(gate) * up is formed while both are at hand.
    void gate(int& stage, const Packed& packed, int rows, int thread) {
        constexpr int panels = 4;
        const Matrix<F> w = matrix(packed);
        const size_t width = w.n / 2;
        team_.stage(stage++, panel_tasks(w.panel_count(), panels), [&](int task) {
            task_of(w, task, panels, team_.size(), normed_.data(), rows, spaces_[thread],
                    [&](int row, int first, int count, const float* sums) {
                        for (int v = 0; v < count; v += 2) {
                            const vec g = load(sums + v * LANES) + w.bias_at((first + v) * LANES);
                            const vec u = load(sums + (v + 1) * LANES) + w.bias_at((first + v + 1) * LANES);
                            F::store(&gated_[row * width + (first + v) / 2 * LANES], silu(g) * u);
                        }
                    });
        });
    }

    // Rotates one token's heads; its queries go to q_ [Hkv][T][group][D], its keys and values into the pool.
    void place(const Batch& b, const LayerWeights& w, int t, elem* pool) {
        const int d = c_.head_dim, g = shape_.group();
        float* q = &qkv_[(size_t)t * w.qkv.n];
        float *k = q + c_.q_heads * d, *v = k + c_.kv_heads * d;
        const int position = (int)b.positions[t];
        const float *cos = c_.cos + (size_t)position * d, *sin = c_.sin + (size_t)position * d;
        for (int h = 0; h < c_.q_heads; h++) {
            rotate(q + h * d, w.q_norm, d, c_.eps, cos, sin);
            act* to = &q_[(((size_t)(h / g) * b.tokens + t) * g + h % g) * d];
            for (int i = 0; i < d; i += LANES) F::store(to + i, load(q + h * d + i));
        }
        const Row& row = rows_[row_of_[t]];
        const size_t block = row.blocks[position / c_.block_tokens];
        bool finite = true;
        for (int h = 0; h < c_.kv_heads; h++) {
            rotate(k + h * d, w.k_norm, d, c_.eps, cos, sin);
            elem* at = pool + (block * c_.kv_heads + h) * 2 * c_.block_tokens * d;
            finite &= keep<F>(k + h * d, v + h * d, d, position % c_.block_tokens, row.first + row.count - t,
                              c_.block_tokens, at);
        }
        if (!finite) std::atomic_ref(b.broken[row_of_[t]]).store(1, std::memory_order_relaxed);
    }

    void head(const Batch& b, int thread, int& stage) {
        const size_t hidden = c_.hidden;
        by_rows(stage, b.samples, [&](int from, int to) {
            for (int s = from; s < to; s++)
                norm<F>(&x_[b.sample_at[s] * hidden], c_.final_norm, hidden, c_.eps, &normed_[s * hidden]);
        });
        const int n = c_.head.n;
        product(stage, c_.head, normed_.data(), b.samples, thread, [&](int s, int column, const vec& value) {
            const int left = std::min(n - column, LANES);
            if (b.logits[s] && left == LANES) {
                store(b.logits[s] + column, value);
            } else if (b.logits[s]) {
                float last[LANES];
                store(last, value);
                std::copy_n(last, left, b.logits[s] + column);
            }
            const size_t at = ((size_t)thread * samples_ + s) * LANES;
            const vec top = load(&top_[at]);
            // NaN counts as infinite: nothing is better, so it is not lost.
            const vec rank = select(value != value, all(std::numeric_limits<float>::infinity()), value);
            ivec better = rank > top;
            if (left < LANES) better = better & (lane_numbers() <= all(left - 1));
            store(&top_[at], select(better, rank, top));
            store(&top_at_[at], select(better, lane_numbers() + all(column), load(&top_at_[at])));
        });
    }

    // The best of all lanes and threads, the lowest id among equals; -1 where that is not finite, or a logit is NaN.
    int64_t winner(int s) const {
        float best = -std::numeric_limits<float>::infinity();
        int id = 0;
        for (int thread = 0; thread < team_.size(); thread++) {
            for (int i = 0; i < LANES; i++) {
                const size_t at = ((size_t)thread * samples_ + s) * LANES + i;
                if (top_[at] > best || (top_[at] == best && top_at_[at] < id)) best = top_[at], id = top_at_[at];
            }
        }
        return std::isfinite(best) ? id : -1;
    }

    const Config c_;
    std::vector<LayerWeights> layers_;
    const Shape shape_;
    Team team_;
    std::vector<Scratch<F>> scratch_;                // by thread, like the next
    std::vector<Workspace> spaces_;
    std::vector<Chooser> choosers_;
    std::vector<std::pair<int, std::unique_ptr<Plan>>> plans_;  // by window
    std::vector<Row> rows_;
    std::vector<int> row_of_;                        // [T]
    std::vector<float> x_, qkv_, top_;               // [T, hidden], [T, (Hq + 2 Hkv) D], [threads, S, 16]
    std::vector<act> normed_, q_, attended_, gated_;
    std::vector<int32_t> top_at_;
    int samples_ = 0;
};

// Null where there is no memory for it.
extern "C" void* wsbatch_create(const Config* config, const LayerWeights* layers) {
    try {
        return static_cast<Runner*>(new Model<WSBATCH_FORMAT>(*config, layers));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

// 0, or 1 where there was no memory; nothing has been computed then. The same for the next.
extern "C" int32_t wsbatch_step(void* runner, const Batch* batch) {
    try {
        static_cast<Runner*>(runner)->step(*batch);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" int32_t wsbatch_choose(void* runner, Choice* choices, int32_t count) {
    try {
        static_cast<Runner*>(runner)->choose(choices, count);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" void wsbatch_destroy(void* runner) { delete static_cast<Runner*>(runner); }
