#include "gpu/driver.h"

#include <chrono>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/interrupts.h"

namespace torch_mesh {
namespace {

constexpr auto kPoll = std::chrono::microseconds(20);

}  // namespace

void wait_for(Driver& driver, Event event, const Runtime& runtime, const char* what) {
  auto look = std::chrono::steady_clock::now() + kInterruptSlice;
  while (!driver.done(event)) {
    std::this_thread::sleep_for(kPoll);
    if (std::chrono::steady_clock::now() < look) continue;
    look += kInterruptSlice;
    check_interrupted(runtime, std::string("waiting for ") + what);
  }
}

void drain(Driver& driver, Stream stream) noexcept {
  try {
    driver.synchronize(stream);
  } catch (const Error&) {  // the device is lost, or the stream is being captured: nothing runs
  }
}

}  // namespace torch_mesh
