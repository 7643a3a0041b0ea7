#include "base/contention.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;

class ContentionTest : public ::testing::Test {
 protected:
  // Notes that a thread waited for a processor during `waited` of the `passed` time.
  void pass(Contention::Clock::duration passed, Contention::Clock::duration waited) {
    now_ += passed;
    contention_.note(now_, passed, waited);
  }
  // How long threads do not spin, from now on.
  Contention::Clock::duration pause() const {
    Contention::Clock::duration passed{0};
    while (contention_.contended(now_ + passed)) passed += 1ms;
    return passed;
  }

  Contention contention_;
  Contention::Clock::time_point now_{};
};

TEST_F(ContentionTest, ShortWaitsForAProcessorDoNotStopSpinning) {
  for (int i = 0; i < 100; ++i) pass(10ms, 3ms);
  EXPECT_EQ(pause(), 0ms);
}

TEST_F(ContentionTest, ADescheduledThreadEndsSpinningForAWhile) {
  pass(10ms, 5ms);
  EXPECT_EQ(pause(), 250ms);
  pass(10ms, 5ms);  // another thread reports the same: the pause stays as it is
  EXPECT_EQ(pause(), 240ms);
}

TEST_F(ContentionTest, ThePauseGrowsWhileTrialsFail) {
  pass(10ms, 5ms);
  for (const auto expected : {500ms, 1000ms, 2000ms, 2000ms}) {
    now_ += pause();
    pass(10ms, 5ms);
    EXPECT_EQ(pause(), expected);
  }
}

TEST_F(ContentionTest, ThePauseIsShortAgainAfterAQuietTime) {
  pass(10ms, 5ms);
  now_ += pause();
  pass(10ms, 5ms);
  EXPECT_EQ(pause(), 500ms);
  now_ += pause() + 500ms;
  pass(10ms, 0ms);
  pass(10ms, 5ms);
  EXPECT_EQ(pause(), 250ms);
}

TEST(TimeWithoutProcessor, IsCountedByTheKernelAndNeverFalls) {
  const auto first = TimeWithoutProcessor::read();
  if (!first) GTEST_SKIP() << "this kernel does not count it";
  std::this_thread::sleep_for(1ms);
  EXPECT_GE(*TimeWithoutProcessor::read(), *first);
}

// A process may have more threads of OpenMP than it may have descriptors.
TEST(TimeWithoutProcessor, KeepsNoFileOpen) {
  Contention contention;
  std::vector<TimeWithoutProcessor> times(8);
  for (TimeWithoutProcessor& time : times) time.note(contention);
  const std::string own =
      "/proc/" + std::to_string(getpid()) + "/task/" + std::to_string(gettid()) + "/schedstat";
  for (const auto& open : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;  // by another thread meanwhile
    EXPECT_NE(std::filesystem::read_symlink(open.path(), closed), own);
  }
}

}  // namespace
}  // namespace torch_mesh
