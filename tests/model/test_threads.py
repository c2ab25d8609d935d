"""The kernels' threads (`threads.cpp`), in a program of their own: they need no more than an x86 processor."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from wsbatch.model import compiled

# Adds up 0..999 in tasks, three times; exits with 0 where the sum is right each time.
PROGRAM = r"""
#include <pthread.h>
#include <sys/wait.h>
#include <dlfcn.h>
#include <cerrno>
#include <cstdlib>
#include "threads.cpp"

static int threads_left = 1000;
extern "C" int pthread_create(pthread_t* id, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    if (threads_left-- <= 0) return EAGAIN;
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    return ((Create)dlsym(RTLD_NEXT, "pthread_create"))(id, attributes, start, argument);
}

static bool works(Team& team) {
    for (int round = 0; round < 3; round++) {
        std::atomic<int> sum{0};
        team.run([&](int) {
            team.stage(0, 1000, [&](int task) { sum += task; });
            team.stage(1, 1000, [&](int task) { sum += task; });
        });
        if (sum != 999 * 1000) return false;
    }
    return true;
}

int main(int, char** arguments) {
    threads_left = std::atoi(arguments[1]);
    auto team = std::make_unique<Team>(4, 2);
    if (!works(*team)) return 1;
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        if (!works(*team)) _exit(2);
        team.reset();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status) return 3;
    return works(*team) ? 0 : 4;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no g++ on x86-64")
    directory = tmp_path_factory.mktemp("threads")
    (directory / "main.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++20", "-O1", "-pthread", f"-I{compiled._SOURCES}", "main.cpp", "-ldl", "-o", "main"]
    subprocess.run(command, cwd=directory, check=True)
    return directory / "main"


@pytest.mark.parametrize("threads", [1000, 2, 1, 0])
def test_all_is_done_by_those_threads_that_start_and_by_a_forked_child(program: Path, threads: int) -> None:
    subprocess.run([program, str(threads)], check=True, timeout=120)
