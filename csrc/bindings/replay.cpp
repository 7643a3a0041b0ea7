#include "bindings/replay.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/engine.h"
#include "bindings/keywords.h"
#include "bindings/profile.h"
#include "bindings/runtime.h"
#include "residency/replay.h"

namespace torch_mesh {
namespace {

namespace py = pybind11;
template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

int32_t dimension(const py::array& array, int axis) {
  const py::ssize_t size = array.shape(axis);
  if (size > INT32_MAX) {
    throw_invalid("a dimension of ids is ", size, "; at most ", INT32_MAX,
                  " is allowed, so replay a part of the trace");
  }
  return static_cast<int32_t>(size);
}

template <typename T>
std::span<const T> span_of(const std::optional<Array<T>>& array) {
  return array ? span_of(*array) : std::span<const T>();
}

template <typename T>
py::array_t<T> copied(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::dict as_dict(const ReplayResult& result) {
  py::dict counts;
  counts["hits"] = copied(result.hits);
  counts["accesses_of"] = copied(result.accesses_of);
  counts["seconds_of"] = copied(result.seconds_of);
  counts["accesses"] = result.counts.accesses;
  counts["inflight_misses"] = result.counts.inflight_misses;
  counts["cold_misses"] = result.counts.cold_misses;
  counts["deferred"] = result.counts.deferred;
  counts["promoted"] = result.counts.promoted;
  counts["early_accesses"] = result.counts.early_accesses;
  counts["early_hits"] = result.counts.early_hits;
  counts["prefetched"] = result.counts.prefetches;
  counts["prefetch_used"] = result.counts.prefetches_used;
  counts["predicted_right"] = result.predicted_right;
  counts["virtual_seconds"] = result.virtual_seconds;
  counts["stalled_seconds"] = result.stalled_seconds;
  counts["idle_seconds"] = result.idle_seconds;
  counts["decision_seconds"] = result.decision_seconds;
  return counts;
}

// The keyword arguments: the arrays of traces, which live as long, and the options of a replay.
struct Arguments {
  int32_t experts;
  std::optional<Array<float>> scores, lookahead;
  std::optional<Array<int64_t>> sequences, forwards;
  ReplayOptions options;

  Arguments(Keywords given, bool ranks)
      : experts(given.take<int32_t>("experts")),
        lookahead(given.take<std::optional<Array<float>>>("lookahead", {})),
        sequences(given.take<std::optional<Array<int64_t>>>("sequences", {})),
        forwards(given.take<std::optional<Array<int64_t>>>("forwards", {})) {
    options.policy = given.take<std::string>("policy");
    options.slots = given.take<int32_t>("slots");
    options.predictor = given.take<std::string>("predictor", "off");
    options.prefetch = given.take<int32_t>("prefetch", 0);
    options.prefill = prefill_from(given.take<std::string>("prefill", "auto"));
    options.read_seconds = given.take<double>("read_seconds", 1);
    options.expert_seconds = given.take<double>("expert_seconds", 1);
    options.rest_seconds = given.take<double>("rest_seconds", 0);
    if (ranks) {
      options.one_disk = given.take<bool>("one_disk", false);
    } else {
      take_for_one(given);
    }
    given.none_left();
  }

 private:
  // Options that ranks do not have.
  void take_for_one(Keywords& given) {
    options.recall = given.take<double>("recall", .75);
    options.seed = given.take<uint64_t>("seed", 0);
    options.soft_pins = soft_pin_options(given);
    options.warm_up.profile = profile_from(given);
    options.deferred = given.take<int32_t>("deferred", 0);
    scores = given.take<std::optional<Array<float>>>("scores", {});
  }
};

// The trace of one of `ranks`, whose ids are the last three dimensions.
RoutingTrace trace_of(const Array<int32_t>& ids, const Arguments& given, int32_t rank,
                      int32_t ranks) {
  const auto part_of = [&](const auto& array) {
    const auto all = span_of(array);
    return all.subspan(rank * (all.size() / ranks), all.size() / ranks);
  };
  const int axis = static_cast<int>(ids.ndim()) - 3;
  return {.tokens = dimension(ids, axis),
          .layers = dimension(ids, axis + 1),
          .experts = given.experts,
          .top_k = dimension(ids, axis + 2),
          .ids = part_of(ids),
          .scores = part_of(given.scores),
          .lookahead = part_of(given.lookahead),
          .sequences = span_of(given.sequences),
          .forwards = span_of(given.forwards)};
}

py::dict replay_trace(const Array<int32_t>& ids, const py::kwargs& arguments) {
  if (ids.ndim() != 3) throw_invalid("ids must be [tokens, layers, top_k]");
  const Arguments given(Keywords("replay()", arguments), /*ranks=*/false);
  const RoutingTrace trace = trace_of(ids, given, 0, 1);
  ReplayResult result;
  {
    py::gil_scoped_release released;
    result = replay(trace, given.options, torch_runtime());
  }
  return as_dict(result);
}

py::list replay_ranks_of(const Array<int32_t>& ids, const Array<double>& exchange_seconds,
                         const py::kwargs& arguments) {
  if (ids.ndim() != 4 || ids.shape(0) < 1) {
    throw_invalid("ids must be [ranks, tokens, layers, top_k], of a rank or more");
  }
  const Arguments given(Keywords("replay_ranks()", arguments), /*ranks=*/true);
  const int32_t ranks = dimension(ids, 0);
  const std::optional<Array<float>>& lookahead = given.lookahead;
  if (lookahead && (lookahead->ndim() != 4 || lookahead->shape(0) != ranks)) {
    throw_invalid("lookahead must be [ranks, tokens, layers, experts]");
  }
  std::vector<RoutingTrace> traces;
  for (int32_t rank = 0; rank < ranks; ++rank) traces.push_back(trace_of(ids, given, rank, ranks));
  std::vector<ReplayResult> results;
  {
    py::gil_scoped_release released;
    results = replay_ranks(traces, given.options, span_of(exchange_seconds), torch_runtime());
  }
  py::list counts;
  for (const ReplayResult& result : results) counts.append(as_dict(result));
  return counts;
}

}  // namespace

void define_replay(py::module_& module) {
  module.def("replay", replay_trace, py::arg("ids"));
  module.def("replay_ranks", replay_ranks_of, py::arg("ids"), py::arg("exchange_seconds"));
}

}  // namespace torch_mesh
