#include "bindings/replay.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "base/error.h"
#include "bindings/engine.h"
#include "bindings/profile.h"
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
  if (size > INT32_MAX) throw Error(ErrorKind::kInvalid, "a trace of 2^31 tokens or more");
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
  counts["kept_accesses"] = result.counts.kept_accesses;
  counts["kept_hits"] = result.counts.kept_hits;
  counts["prefetched"] = result.counts.prefetches;
  counts["prefetch_used"] = result.counts.prefetches_used;
  counts["predicted_right"] = result.predicted_right;
  counts["virtual_seconds"] = result.virtual_seconds;
  counts["stalled_seconds"] = result.stalled_seconds;
  counts["idle_seconds"] = result.idle_seconds;
  counts["decision_seconds"] = result.decision_seconds;
  return counts;
}

py::dict replay_trace(const Array<int32_t>& ids, int32_t experts, const std::string& policy,
                      int32_t slots, const std::optional<Array<float>>& scores,
                      const std::optional<Array<float>>& lookahead,
                      const std::optional<Array<int64_t>>& sequences,
                      const std::optional<Array<int64_t>>& forwards, const std::string& prefill,
                      int32_t deferred, const std::string& predictor, int32_t prefetch,
                      double recall, uint64_t seed, double read_seconds, double expert_seconds,
                      double rest_seconds, const std::optional<ProfileArrays>& profile,
                      int32_t early_layers, int32_t early_experts) {
  if (ids.ndim() != 3) throw Error(ErrorKind::kInvalid, "ids must be [tokens, layers, top_k]");
  const RoutingTrace trace{.tokens = dimension(ids, 0),
                           .layers = dimension(ids, 1),
                           .experts = experts,
                           .top_k = dimension(ids, 2),
                           .ids = span_of(ids),
                           .scores = span_of(scores),
                           .lookahead = span_of(lookahead),
                           .sequences = span_of(sequences),
                           .forwards = span_of(forwards)};
  const ReplayOptions options{.policy = policy,
                              .slots = slots,
                              .predictor = predictor,
                              .prefetch = prefetch,
                              .recall = recall,
                              .seed = seed,
                              .soft_pins = soft_pin_options(profile, early_layers, early_experts),
                              .prefill = prefill_from(prefill),
                              .deferred = deferred,
                              .read_seconds = read_seconds,
                              .expert_seconds = expert_seconds,
                              .rest_seconds = rest_seconds};
  ReplayResult result;
  {
    py::gil_scoped_release released;
    result = replay(trace, options);
  }
  return as_dict(result);
}

// The part of [ranks, tokens, layers, ...] that belongs to `rank`.
template <typename T>
std::span<const T> part_of(const std::optional<Array<T>>& array, int32_t rank, int32_t ranks) {
  const std::span<const T> all = span_of(array);
  return all.subspan(rank * (all.size() / ranks), all.size() / ranks);
}

py::list replay_ranks_of(const Array<int32_t>& ids, const Array<double>& exchange_seconds,
                         int32_t experts, const std::string& policy, int32_t slots,
                         const std::optional<Array<float>>& scores,
                         const std::optional<Array<float>>& lookahead,
                         const std::optional<Array<int64_t>>& sequences,
                         const std::optional<Array<int64_t>>& forwards, const std::string& prefill,
                         const std::string& predictor, int32_t prefetch, double read_seconds,
                         double expert_seconds, double rest_seconds, bool one_disk) {
  if (ids.ndim() != 4 || ids.shape(0) < 1) {
    throw Error(ErrorKind::kInvalid,
                "ids must be [ranks, tokens, layers, top_k], of a rank or more");
  }
  const int32_t ranks = dimension(ids, 0);
  const auto check_shape = [&](const char* name, const std::optional<Array<float>>& given) {
    if (given && (given->ndim() != 4 || given->shape(0) != ranks)) {
      throw Error(ErrorKind::kInvalid,
                  std::string(name) + " must be [ranks, tokens, layers, experts]");
    }
  };
  check_shape("scores", scores);
  check_shape("lookahead", lookahead);
  std::vector<RoutingTrace> traces;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    traces.push_back({.tokens = dimension(ids, 1),
                      .layers = dimension(ids, 2),
                      .experts = experts,
                      .top_k = dimension(ids, 3),
                      .ids = part_of<int32_t>(ids, rank, ranks),
                      .scores = part_of(scores, rank, ranks),
                      .lookahead = part_of(lookahead, rank, ranks),
                      .sequences = span_of(sequences),
                      .forwards = span_of(forwards)});
  }
  const ReplayOptions options{.policy = policy,
                              .slots = slots,
                              .predictor = predictor,
                              .prefetch = prefetch,
                              .prefill = prefill_from(prefill),
                              .read_seconds = read_seconds,
                              .expert_seconds = expert_seconds,
                              .rest_seconds = rest_seconds,
                              .one_disk = one_disk};
  std::vector<ReplayResult> results;
  {
    py::gil_scoped_release released;
    results = replay_ranks(traces, options, span_of(exchange_seconds));
  }
  py::list counts;
  for (const ReplayResult& result : results) counts.append(as_dict(result));
  return counts;
}

}  // namespace

void define_replay(py::module_& module) {
  module.def("replay", replay_trace, py::arg("ids"), py::kw_only(), py::arg("experts"),
             py::arg("policy"), py::arg("slots"), py::arg("scores") = py::none(),
             py::arg("lookahead") = py::none(), py::arg("sequences") = py::none(),
             py::arg("forwards") = py::none(), py::arg("prefill") = "auto", py::arg("deferred") = 0,
             py::arg("predictor") = "off", py::arg("prefetch") = 0, py::arg("recall") = .75,
             py::arg("seed") = 0, py::arg("read_seconds") = 1., py::arg("expert_seconds") = 1.,
             py::arg("rest_seconds") = 0., py::arg("profile") = py::none(),
             py::arg("early_layers") = 0, py::arg("early_experts") = 0);
  module.def("replay_ranks", replay_ranks_of, py::arg("ids"), py::arg("exchange_seconds"),
             py::kw_only(), py::arg("experts"), py::arg("policy"), py::arg("slots"),
             py::arg("scores") = py::none(), py::arg("lookahead") = py::none(),
             py::arg("sequences") = py::none(), py::arg("forwards") = py::none(),
             py::arg("prefill") = "auto", py::arg("predictor") = "off", py::arg("prefetch") = 0,
             py::arg("read_seconds") = 1., py::arg("expert_seconds") = 1.,
             py::arg("rest_seconds") = 0., py::arg("one_disk") = false);
}

}  // namespace torch_mesh
