// Children forked while other threads of the parent are at any point. Calls in a child throw
// Error(kForked) before they take a lock that one of those threads may have held.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine_fixture.h"

namespace torch_mesh {
namespace {

using namespace testing;

constexpr int32_t kForks = 400;

// Returns how many of `calls` throw Error(kForked).
int32_t refusals(const std::vector<std::function<void()>>& calls) {
  int32_t count = 0;
  for (const auto& call : calls) {
    try {
      call();
    } catch (const Error& error) {
      count += error.kind() == ErrorKind::kForked;
    }
  }
  return count;
}

// Forks children that make all of `calls`, while threads of the parent make one call each.
void expect_refused(const std::vector<std::function<void()>>& calls) {
  std::atomic<bool> ending{false};
  std::vector<std::thread> busy;
  for (const auto& call : calls) {
    busy.emplace_back([&] {
      while (!ending) call();
    });
  }
  int32_t hung = 0, refused = 0;
  for (int32_t fork = 0; fork < kForks && hung == 0; ++fork) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      ::_exit(refusals(calls) == std::ssize(calls) ? 0 : 1);
    }
    int status = -1;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    hung += WIFSIGNALED(status);
    refused += WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  ending = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(hung, 0);
  EXPECT_EQ(refused, kForks);
}

class ForkTest : public ::testing::Test {
 protected:
  const Model model_{small_shape(Format::kInt8)};
  const std::unique_ptr<Engine> engine_ = model_.open_resident({});
  Pool& pool_ = engine_->pool();
};

TEST_F(ForkTest, CountersAreRefusedInAChildWithoutWaiting) {
  const std::vector<int64_t> ids{0, 1, 2};
  const std::vector<int32_t> on_gpu(kExperts, 0);
  expect_refused({
      [&] { pool_.count_rerouted(0, 1); },
      [&] { pool_.count_on_gpu(0, ids, 3, on_gpu, true); },
      [&] { static_cast<void>(pool_.detailed_stats()); },
  });
}

TEST_F(ForkTest, ForwardsAreRefusedInAChildWithoutWaitingForAWorkspace) {
  const Batch batch(1, 2, model_.shape().hidden, 7);
  const auto forward = [&] { static_cast<void>(batch.run(*engine_, 0)); };
  const auto describe = [&] { static_cast<void>(engine_->workspace_bytes()); };
  expect_refused({forward, describe, describe});
}

}  // namespace
}  // namespace torch_mesh
