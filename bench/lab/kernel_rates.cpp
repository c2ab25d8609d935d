// How fast one thread multiplies WSBATCH_FORMAT: prints a line `rows panels GMAC/s` for each number of rows and of panels
// in a task, and before them `0 0` with the most that the same instruction reaches in registers.
#include <chrono>
#include <cstdio>
#include <memory>

#include "gemm.cpp"

using F = WSBATCH_FORMAT;

constexpr int K = 576, TASKS = 8;  // weights of all tasks together fit into the second-level cache

// The least time of many short repeats: what else the machine does only ever makes one longer.
template <class Work>
static double least_s(int repeats, Work&& work) {
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < repeats; i++) {
        const auto begin = std::chrono::steady_clock::now();
        work();
        least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return least;
}

// Independent sums, enough of them to hide an instruction's latency, in registers all the while.
constexpr int CHAINS = WIDTH == 16 ? 16 : 12;

__attribute__((noinline)) static fpart chains(const F::Operand::act* a, const fpart* b, int rounds) {
    fpart sums[CHAINS], total = {};
    const fpart column = *b;
    each<CHAINS>([&](auto c) __attribute__((always_inline)) { sums[c] = b[c]; });
    for (int i = 0; i < rounds; i++)
        each<CHAINS>([&](auto c) __attribute__((always_inline)) { sums[c] = F::Operand::madd(sums[c], a, column); });
    for (const auto& sum : sums) total += sum;
    return total;
}

static double peak_gmacs() {
    constexpr int ROUNDS = 20000;
    const F::Operand::act a[2] = {};
    const fpart b[CHAINS] = {};
    auto hidden_chains = chains;
    asm volatile("" : "+r"(hidden_chains));  // or the compiler works the sum out itself
    volatile float kept;
    const double least = least_s(200, [&] { kept = hidden_chains(a, b, ROUNDS)[0]; });
    return (double)ROUNDS * CHAINS * WIDTH * F::Operand::ACTS / least / 1e9;
}

int main() {
    std::printf("0 0 %.1f\n", peak_gmacs());
    for (int panels : {3, 4}) {
        const int n = TASKS * panels * LANES;
        std::vector<F::elem> weights((size_t)n * K);  // zeros: no product is slower for its numbers
        const Matrix<F> matrix{(const unit*)weights.data(), nullptr, n, K};
        const auto space = std::make_unique<Workspace>();
        for (int rows : {1, 2, 4, 6, 8, 12, 16, 32, 64, 256}) {
            std::vector<F::act> acts((size_t)rows * K);
            std::vector<float> out((size_t)rows * n);
            const double least = least_s(rows > 64 ? 60 : 600, [&] {
                for (int task = 0; task < TASKS; task++) {
                    task_of(matrix, task, panels, 1, acts.data(), rows, *space,
                            [&](int row, int first, int count, const float* sums) {
                                for (int v = 0; v < count; v++)
                                    store(&out[(size_t)row * n + (first + v) * LANES], load(sums + v * LANES));
                            });
                }
            });
            std::printf("%d %d %.1f\n", rows, panels, (double)rows * n * K / least / 1e9);
        }
    }
}
