// Steps of random small models through the kernels, for a sanitizer or an emulator: every buffer has exactly its size.
//
// Arguments: the first seed, and how many. Each seed is a model in WSBATCH_FORMAT (shapes, windows, biases, threads) and a
// few ragged steps of it: rows join in chunks, decode, some have a token whose embedding is NaN, and some steps find no
// memory at first. Prints the best ids of each seed's sound rows: a line that is the same for every level but for
// rounding. Exits with 1 where a step's best id is not that of its logits, or where the wrong rows are called broken.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "step.cpp"

using Random = std::mt19937;

// Memory runs out after so many allocations. None may fail on a helper thread: nobody could catch that.
constexpr long PLENTY = std::numeric_limits<long>::max();
static std::atomic<long> allocations_left = PLENTY;

void* operator new(size_t size) {
    void* made = allocations_left.fetch_sub(1) > 0 ? std::malloc(size) : nullptr;
    if (!made) throw std::bad_alloc();
    return made;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }

static int pick(Random& random, int least, int most) { return std::uniform_int_distribution(least, most)(random); }

template <class T>
static std::vector<T> numbers(Random& random, size_t count, float scale, float mean = 0) {
    std::vector<T> made(count);
    std::normal_distribution<float> normal(mean, scale);
    for (auto& value : made) {
        const float x = normal(random);
        if constexpr (sizeof(T) == sizeof(float)) {
            value = x;
        } else {
            uint32_t bits;
            std::memcpy(&bits, &x, sizeof(bits));
            value = bits >> 16;
        }
    }
    return made;
}

struct Sequence {
    std::vector<int32_t> blocks;
    int held = 0, length = 0;  // tokens in the pool, and of the prompt
    bool sound = true, poisoned = false;  // whether it may get a poisoned token, and whether it has one
};

template <class T>
class Trial {
  public:
    explicit Trial(int seed) : random_(seed) {
        const int units[] = {16, 32, 48, 64, 80};
        auto& c = config_;
        c.threads = pick(random_, 1, 3);
        c.layers = pick(random_, 1, 2);
        c.hidden = 16 * pick(random_, 1, 6);
        c.kv_heads = pick(random_, 1, 3);
        c.q_heads = c.kv_heads * pick(random_, 1, 5);
        c.head_dim = units[pick(random_, 0, 4)];
        c.block_tokens = 16 * pick(random_, 1, 3);
        c.total_blocks = ROWS * (LONGEST / c.block_tokens + 2);
        c.eps = 1e-5f;
        c.scale = 1.0f / std::sqrt((float)c.head_dim);
        vocab_ = pick(random_, 2, 70);
        auto& embedding = keep(numbers<T>(random_, (size_t)vocab_ * c.hidden, 1));
        const float nan = std::numeric_limits<float>::quiet_NaN();
        embedding[0] = sizeof(T) != sizeof(float) ? (T)0x7fc0 : (T)nan;  // token 0 is the poisoned one
        c.embedding = embedding.data();
        c.head = packed(vocab_, c.hidden);
        c.final_norm = floats(c.hidden, 1);
        c.cos = floats((LONGEST + 64) * c.head_dim);
        c.sin = floats((LONGEST + 64) * c.head_dim);
        const size_t block = (size_t)c.kv_heads * 2 * c.block_tokens * c.head_dim;
        c.pool = keep(std::vector<T>((size_t)c.layers * c.total_blocks * block)).data();
        const int width = 16 * pick(random_, 1, 7);
        const bool head_norms = pick(random_, 0, 1);
        for (int i = 0; i < c.layers; i++) {
            layers_.push_back({packed((c.q_heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
                               packed(c.hidden, c.q_heads * c.head_dim), packed(2 * width, c.hidden),
                               packed(c.hidden, width), floats(c.hidden, 1), floats(c.hidden, 1),
                               head_norms ? floats(c.head_dim, 1) : nullptr,
                               head_norms ? floats(c.head_dim, 1) : nullptr, window()});
        }
        runner_ = wsbatch_create(&c, layers_.data());
    }

    ~Trial() { wsbatch_destroy(runner_); }

    bool run() {
        std::vector<int32_t> blocks(config_.total_blocks);
        std::iota(blocks.begin(), blocks.end(), 0);
        std::shuffle(blocks.begin(), blocks.end(), random_);
        std::vector<Sequence> sequences(pick(random_, 1, ROWS));
        for (auto& sequence : sequences) {
            sequence.length = pick(random_, 1, pick(random_, 1, LONGEST));  // mostly short ones
            const int needed = (sequence.length + STEPS) / config_.block_tokens + 1;
            sequence.sound = pick(random_, 0, 3);
            sequence.blocks.assign(blocks.end() - needed, blocks.end());
            blocks.resize(blocks.size() - needed);
        }
        for (int i = 0; i < STEPS; i++)
            if (!step(sequences)) return false;
        return true;
    }

  private:
    static constexpr int ROWS = 9, LONGEST = 420, STEPS = 5;

    std::vector<T>& keep(std::vector<T> made) { return kept_.emplace_back(std::move(made)); }

    const float* floats(size_t count, float mean = 0) {
        return floats_.emplace_back(numbers<float>(random_, count, 0.5f, mean)).data();
    }

    int window() {
        const bool windowed = pick(random_, 0, 1);
        return windowed * pick(random_, 1, 90);
    }

    Packed packed(int n, int k) {
        const size_t lanes = (n + LANES - 1) / LANES * LANES;
        const float* bias = pick(random_, 0, 1) ? floats(lanes) : nullptr;
        return {keep(numbers<T>(random_, lanes * k, 0.3f)).data(), bias, n, k};
    }

    bool step(std::vector<Sequence>& sequences) {
        std::vector<int64_t> ids, positions, sample_at;
        std::vector<int32_t> starts{0}, lens;
        std::vector<Sequence*> rows;
        size_t widest = 0;
        for (auto& sequence : sequences) {
            if (pick(random_, 0, 3) == 0) continue;  // it sits this step out
            const int left = sequence.length - sequence.held, count = left > 0 ? pick(random_, 1, left) : 1;
            for (int i = 0; i < count; i++) {
                ids.push_back(sequence.sound || pick(random_, 0, 4) ? pick(random_, 1, vocab_ - 1) : 0);
                positions.push_back(sequence.held++);
                sequence.poisoned |= ids.back() == 0;
            }
            if (left <= count) sample_at.push_back((int64_t)ids.size() - 1);
            starts.push_back((int32_t)ids.size());
            lens.push_back(sequence.held);
            rows.push_back(&sequence);
            widest = std::max(widest, sequence.blocks.size());
        }
        if (rows.empty()) return true;
        std::vector<int32_t> tables;
        for (auto* row : rows) {
            tables.insert(tables.end(), row->blocks.begin(), row->blocks.end());
            tables.resize(tables.size() + widest - row->blocks.size());
        }
        tables.shrink_to_fit();
        std::vector<std::vector<float>> logits(sample_at.size(), std::vector<float>(vocab_));
        std::vector<float*> places;
        for (auto& row : logits) places.push_back(pick(random_, 0, 2) ? row.data() : nullptr);
        std::vector<int64_t> best(sample_at.size());
        std::vector<uint8_t> broken(rows.size());
        double stage_ms[PARTS] = {};
        const Batch batch{(int)rows.size(), (int)ids.size(), (int)sample_at.size(), (int)widest, ids.data(),
                          positions.data(), sample_at.data(), starts.data(), lens.data(), tables.data(),
                          places.data(), best.data(), broken.data(), stage_ms};
        allocations_left = pick(random_, 0, 6);
        const int32_t failed = wsbatch_step(runner_, &batch);
        allocations_left = PLENTY;
        if (failed && wsbatch_step(runner_, &batch)) return false;
        for (size_t s = 0, r = 0; s < best.size(); s++) {
            while (starts[r + 1] <= sample_at[s]) r++;
            const auto& row = logits[s];
            const int64_t expected = std::max_element(row.begin(), row.end()) - row.begin();
            if (rows[r]->poisoned) continue;
            if (best[s] < 0 || (places[s] && best[s] != expected)) return false;
            std::printf(" %d", (int)best[s]);
        }
        for (size_t r = 0; r < rows.size(); r++) {
            const bool poisoned = std::count(ids.begin() + starts[r], ids.begin() + starts[r + 1], 0) > 0;
            if (poisoned ? !broken[r] : (broken[r] && !rows[r]->poisoned)) return false;
        }
        return true;
    }

    Random random_;
    Config config_{};
    int vocab_;
    std::deque<std::vector<T>> kept_;
    std::deque<std::vector<float>> floats_;
    std::vector<LayerWeights> layers_;
    void* runner_ = nullptr;
};

int main(int, char** arguments) {
    const int first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
    for (int seed = first; seed < first + count; seed++) {
        std::printf("seed %d:", seed);
        if (!Trial<WSBATCH_FORMAT::elem>(seed).run()) {
            std::fprintf(stderr, "seed %d: wrong\n", seed);
            return 1;
        }
        std::printf("\n");
    }
    std::printf("%d models\n", count);
}
