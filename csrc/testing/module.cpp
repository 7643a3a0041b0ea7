// torch_mesh._testing: functions of the engine that only tests and benchmarks need. A checkout has
// it; the wheel does not. It is linked with its own copy of the engine's objects, and works on
// objects that torch_mesh._C has made.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/device.h"
#include "bindings/engine.h"
#include "bindings/keywords.h"
#include "bindings/openmp_sleeps.h"
#include "bindings/runtime.h"
#include "testing/faults.h"
#include "testing/product_time.h"
#include "testing/random_reads.h"
#include "testing/record_sum.h"
#include "testing/simulated_device.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;

std::chrono::microseconds delay_from(double seconds) {
  if (!(seconds >= 0 && seconds <= kMaxTimeout)) {
    throw_invalid("max_delay is ", seconds, " seconds; allowed: 0 to ",
                  static_cast<int64_t>(kMaxTimeout));
  }
  return std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
}

PyInterpose faults(const py::kwargs& options) {
  Keywords given("faults", options);
  const auto number = [&](const char* name) { return given.take<double>(name, 0); };
  Faults faults{.seed = given.take<uint64_t>("seed", 0),
                .short_read = number("short_read"),
                .eintr = number("eintr"),
                .eagain = number("eagain"),
                .eio_once = number("eio_once"),
                .eio_always = number("eio_always"),
                .delay = number("delay"),
                .reorder = number("reorder"),
                .bit_flip = number("bit_flip"),
                .wrong_offset = number("wrong_offset")};
  const double default_delay = std::chrono::duration<double>(faults.max_delay).count();
  faults.max_delay = delay_from(given.take<double>("max_delay", default_delay));
  given.none_left();
  return {with_faults(faults)};
}

std::shared_ptr<Driver> simulated_device(uint64_t seed, int32_t max_delay_us) {
  return make_simulated_device({.seed = seed, .max_delay_us = max_delay_us});
}

uint64_t sum_records(const PyEngine& engine, int32_t layer, const std::vector<int32_t>& experts) {
  return engine.call([&](Engine& engine) { return record_sum(engine, layer, experts); });
}

}  // namespace
}  // namespace torch_mesh

PYBIND11_MODULE(_testing, m) {
  namespace py = pybind11;
  using namespace torch_mesh;
  py::module_::import("torch_mesh._C");  // the types that these functions take and return
  m.def(
      "faults", faults,
      "For Engine(interpose=): faults of reads, see csrc/testing/faults.h. `seed`, `max_delay` in "
      "seconds, and a probability of each.");
  m.def("chunks_given", chunks_given,
        "Chunks of reads that have been begun in this process, of those with faults.");
  m.def("simulated_device", simulated_device, py::arg("seed") = 0, py::arg("max_delay_us") = 0,
        "For HostShare: a device in process, whose memory is the CPU's; the delays are of its "
        "streams.");
  m.def(
      "openmp_sleeps", [] { return OpenMpSleeps().end(); },
      py::call_guard<py::gil_scoped_release>(),
      "Makes idle OpenMP threads sleep for a moment; whether it could.");
  m.def("sum_records", sum_records, py::arg("engine"), py::arg("layer"), py::arg("experts"),
        "The sum, modulo 2**64, of distinct experts' records as words: a plain read on the "
        "engine's threads.");
  m.def("product_ways", &product_ways, py::arg("isa"), py::arg("format"),
        "The ways that a product of a format may go on this machine, 'few', 'panels' and "
        "'tiles', with the rows from which on it does.");
  m.def(
      "product_seconds",
      [](const std::string& isa, const std::string& format, int32_t group_size, int32_t in_features,
         int32_t out_features, int32_t rows, const std::string& way) {
        return product_seconds(torch_runtime(), isa, format, group_size, in_features, out_features,
                               rows, way);
      },
      py::arg("isa"), py::arg("format"), py::arg("group_size"), py::arg("in_features"),
      py::arg("out_features"), py::arg("rows"), py::arg("way"),
      py::call_guard<py::gil_scoped_release>(),
      "What one thread takes for `rows` rows times one matrix by one way, in seconds.");
  m.def(
      "random_read_seconds",
      [](const std::string& path, const std::vector<int64_t>& offsets, int32_t bytes, int32_t depth,
         int32_t batch) { return random_read_seconds(path, offsets, bytes, depth, batch); },
      py::arg("path"), py::arg("offsets"), py::arg("bytes"), py::arg("depth"), py::arg("batch") = 0,
      py::call_guard<py::gil_scoped_release>(),
      "Seconds for direct reads of `bytes` bytes at `offsets` of a file, by one io_uring with at "
      "most `depth` under way. With `batch` all of so many reads are waited for before the next "
      "begin.");
}
