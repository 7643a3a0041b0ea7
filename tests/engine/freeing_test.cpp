// Freeing an engine whose reads take long or never end.
#include "base/freeing.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "engine_fixture.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using namespace testing;

constexpr auto kLong = std::chrono::minutes(2);
constexpr auto kForEver = std::chrono::hours(24);

int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

class FreeingTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("uring") && !uring_unavailable().empty()) {
      GTEST_SKIP() << uring_unavailable();
    }
  }

  // An engine with reads in flight. Each takes up to `delay`; with this seed nearly half of it.
  std::unique_ptr<Engine> open(std::chrono::microseconds delay) const {
    Model::Options options;
    options.reader = GetParam();
    options.faults.seed = 0;
    options.faults.delay = 1;
    options.faults.max_delay = delay;
    std::unique_ptr<Engine> engine = model_.open(options);
    std::vector<int32_t> all(kExperts);
    std::iota(all.begin(), all.end(), 0);
    const int64_t before = chunks_given();
    engine->pool().prefetch(0, all);
    while (chunks_given() == before) std::this_thread::sleep_for(1ms);
    return engine;
  }

  const Model model_{small_shape(Format::kInt8)};
};

TEST_P(FreeingTest, TheLastUserDoesNotWaitAndEverythingIsFreed) {
  const int64_t before = open_descriptors();
  std::unique_ptr<Engine> engine = open(3s);
  const auto freeing = std::make_shared<Freeing>();
  freeing->begin(std::move(engine));
  EXPECT_EQ(error_of([&] { freeing->wait(10ms, {}); }).kind(), ErrorKind::kTimeout);
  EXPECT_GT(open_descriptors(), before);
  freeing->wait(kLong, {});
  EXPECT_EQ(open_descriptors(), before);
  freeing->wait(0ms, {});  // a second wait returns at once
}

TEST_P(FreeingTest, AWaitCanBeInterrupted) {
  Runtime runtime;
  runtime.interrupted = [] { return true; };
  const auto freeing = std::make_shared<Freeing>();
  // The wait for a forward that does not end, ...
  EXPECT_EQ(error_of([&] { freeing->wait(kLong, runtime); }).kind(), ErrorKind::kInterrupted);
  freeing->begin(open(3s));  // ... or for reads
  EXPECT_EQ(error_of([&] { freeing->wait(kLong, runtime); }).kind(), ErrorKind::kInterrupted);
  freeing->wait(kLong, {});
}

TEST_P(FreeingTest, AWaitForForwardsThatDoNotEndTimesOut) {
  const Error error = error_of([] { std::make_shared<Freeing>()->wait(20ms, {}); });
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  EXPECT_NE(std::string(error.what()).find("forwards have not ended"), std::string::npos);
}

// Threads drop their references to an engine in any order while another thread waits.
TEST_P(FreeingTest, AnyThreadMayDropTheLastReference) {
  struct Shared {
    Shared(std::unique_ptr<Engine> engine, std::shared_ptr<Freeing> freeing)
        : engine(std::move(engine)), freeing(std::move(freeing)) {}
    ~Shared() { freeing->begin(std::move(engine)); }
    std::unique_ptr<Engine> engine;
    std::shared_ptr<Freeing> freeing;
  };
  const int64_t before = open_descriptors();
  for (int32_t round = 0; round < 20; ++round) {
    const auto freeing = std::make_shared<Freeing>();
    auto shared = std::make_shared<Shared>(open(2ms), freeing);
    std::vector<std::thread> users;
    for (uint64_t user = 0; user < 3; ++user) {
      users.emplace_back([mine = shared, user] {
        const Batch batch(2, 2, mine->engine->layout().hidden, user);
        static_cast<void>(batch.run(*mine->engine, 0));
      });
    }
    shared.reset();
    freeing->wait(kLong, {});
    EXPECT_EQ(open_descriptors(), before);
    for (std::thread& user : users) user.join();
  }
}

TEST_P(FreeingTest, AProcessExitsDespiteReadsThatNeverEnd) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end = [this] {
    const auto freeing = std::make_shared<Freeing>();
    freeing->begin(open(kForEver));
    model_.remove_file();
    if (error_of([&] { freeing->wait(50ms, {}); }).kind() != ErrorKind::kTimeout) std::abort();
    std::exit(7);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(7), "");
}

// Makes every new thread fail, by a stack size that no machine has.
void allow_no_thread() {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0 ||
      pthread_attr_setstacksize(&attributes, size_t{1} << 50) != 0 ||
      pthread_setattr_default_np(&attributes) != 0) {
    std::abort();
  }
}

TEST_P(FreeingTest, WithoutAThreadToFreeItTheEngineLeaksAndWaitFails) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end = [this] {
    const auto freeing = std::make_shared<Freeing>();
    std::unique_ptr<Engine> engine = open(kForEver);
    model_.remove_file();
    allow_no_thread();
    freeing->begin(std::move(engine));
    const Error error = error_of([&] { freeing->wait(kLong, {}); });
    // _exit skips LeakSanitizer: the engine is leaked.
    ::_exit(error.kind() == ErrorKind::kMemory ? 7 : 1);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(7), "");
}

INSTANTIATE_TEST_SUITE_P(Readers, FreeingTest, ::testing::Values("uring", "threads"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace torch_mesh
