// A small team of threads that walks one program of stages together.
//
// Every thread runs the same function. A stage is a number of tasks: threads claim them one at a time from a counter
// and go on once all are done. A thread that wakes late, or that the system has set aside, holds nobody up unless it
// is inside a task: the others do its share. That matters where an event loop shares the processors.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

// Tells the processor that this thread waits in a loop.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Stage {
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<int> done{0};
};

class Team {
  public:
    // Where the system starts fewer threads than asked for, the work is shared among those.
    Team(int threads, int stages) : stages_(stages), seats_(threads - 1), threads_(new std::vector<std::thread>) {
        threads_->reserve(threads - 1);
        try {
            for (int i = 0; i < threads - 1; i++) threads_->emplace_back([this, i] { serve(i); });
        } catch (const std::system_error&) {
        }
    }

    ~Team() {
        if (forked()) {
            threads_.release();  // a thread that is not in this process can be neither joined nor detached
            return;
        }
        quit_ = true;
        for (auto& seat : seats_) {
            seat.state.store(CALLED, std::memory_order_release);
            seat.state.notify_one();
        }
        for (auto& thread : *threads_) thread.join();
    }

    int size() const { return (int)seats_.size() + 1; }

    // Runs program(thread number) on the caller and on every helper that comes in time.
    void run(const std::function<void(int)>& program) {
        for (auto& stage : stages_) {
            stage.next.store(0, std::memory_order_relaxed);
            stage.done.store(0, std::memory_order_relaxed);
        }
        if (forked()) {
            program(0);
            return;
        }
        program_ = &program;
        for (auto& seat : seats_) {
            seat.state.store(CALLED, std::memory_order_release);
            seat.state.notify_one();
        }
        program(0);
        for (auto& seat : seats_) {
            int expected = CALLED;  // never came: call it off
            if (seat.state.compare_exchange_strong(expected, IDLE)) continue;
            wait([&] { return seat.state.load(std::memory_order_acquire) == IDLE; });
        }
    }

    // One stage of the program: task(0..count-1), shared among whoever is here.
    template <class Task>
    void stage(int index, int count, Task&& task) {
        Stage& stage = stages_[index];
        int mine = 0;
        while (stage.next.load(std::memory_order_relaxed) < count) {
            int t = stage.next.fetch_add(1, std::memory_order_relaxed);
            if (t >= count) break;
            task(t);
            mine++;
        }
        if (mine) stage.done.fetch_add(mine, std::memory_order_acq_rel);
        wait([&] { return stage.done.load(std::memory_order_acquire) >= count; });
    }

  private:
    // In a process that was forked from the one that made the team: its helpers stayed behind.
    bool forked() const { return getpid() != owner_; }

    enum : int { IDLE, CALLED, RUNNING };
    struct alignas(64) Seat {
        std::atomic<int> state{IDLE};
    };

    template <class Ready>
    static void wait(Ready&& ready) {
        for (int spins = 0; !ready(); spins++) {
            if (spins < 4000) {
                relax();
            } else {
                sched_yield();  // somebody else may need this processor to let the last task finish
            }
        }
    }

    void serve(int seat) {
        auto& state = seats_[seat].state;
        for (;;) {
            state.wait(IDLE, std::memory_order_acquire);
            int expected = CALLED;
            if (!state.compare_exchange_strong(expected, RUNNING, std::memory_order_acq_rel)) continue;
            if (quit_) return;
            (*program_)(seat + 1);
            state.store(IDLE, std::memory_order_release);
        }
    }

    std::vector<Stage> stages_;
    std::vector<Seat> seats_;
    std::unique_ptr<std::vector<std::thread>> threads_;
    const pid_t owner_ = getpid();
    std::atomic<bool> quit_{false};
    const std::function<void(int)>* program_ = nullptr;
};
