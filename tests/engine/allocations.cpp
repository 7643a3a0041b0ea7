#include "allocations.h"

#include <pthread.h>

#include <array>
#include <cstdlib>
#include <new>
#include <string_view>

namespace torch_mesh::testing {

thread_local int64_t allocations = 0;
std::atomic<bool> io_starves = false;

namespace {

constexpr int64_t kNever = INT64_MAX;
std::atomic<int64_t> until_failure = kNever;
std::atomic<bool> fails_for_good = false;

bool on_io_thread() {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return std::string_view(name.data()) == "mesh-io";
}

bool fails() {
  ++allocations;
  if (io_starves && on_io_thread()) return true;
  if (until_failure == kNever) return false;
  const int64_t left = until_failure--;
  return left == 0 || (left < 0 && fails_for_good);
}

}  // namespace

FailingAllocation::FailingAllocation(int64_t number, bool all) {
  fails_for_good = all;
  until_failure = number;
}
FailingAllocation::~FailingAllocation() { until_failure = kNever; }
bool FailingAllocation::reached() const { return until_failure < 0; }

}  // namespace torch_mesh::testing

void* operator new(std::size_t bytes) {
  if (torch_mesh::testing::fails()) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return torch_mesh::testing::fails() ? nullptr : std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
