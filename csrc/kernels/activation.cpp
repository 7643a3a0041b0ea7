#include "kernels/activation.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"

namespace torch_mesh {
namespace {

constexpr std::pair<std::string_view, Activation> kNamed[] = {
    {"silu", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_tanh", Activation::kGeluTanh},
    {"relu2", Activation::kRelu2},
    {"swigluoai", kSwigluOai},
};

[[noreturn]] void unknown(std::string_view name, std::string_view why) {
  throw_invalid("unknown activation \"", name, "\"", why,
                "; there are \"silu\", \"gelu\", \"gelu_tanh\", \"relu2\", "
                "\"swiglu(alpha=1,offset=0,gate=10,up=10)\" and \"softcap(gate=4,up=25)\" with "
                "their parameters, and \"swigluoai\"");
}

// nullptr where the kind has no parameter of that name.
float* parameter(Activation& activation, std::string_view name) {
  if (name == "gate") return &activation.gate_limit;
  if (name == "up") return &activation.up_limit;
  if (activation.kind == Activation::kSwiglu && name == "alpha") return &activation.alpha;
  if (activation.kind == Activation::kSwiglu && name == "offset") return &activation.offset;
  return nullptr;
}

void set_parameter(Activation& activation, std::string_view whole, std::string_view given) {
  const size_t equals = given.find('=');
  float* value = parameter(activation, given.substr(0, equals));
  if (value == nullptr || equals == std::string_view::npos) {
    unknown(whole, ": it has no parameter \"" + std::string(given) + "\"");
  }
  const char* begin = given.data() + equals + 1;
  const char* end = given.data() + given.size();
  const auto [last, error] = std::from_chars(begin, end, *value);
  const bool positive = value == &activation.offset || *value > 0;
  if (error != std::errc{} || last != end || !std::isfinite(*value) || !positive) {
    unknown(whole, ": \"" + std::string(given) + "\" is not a finite number above 0");
  }
}

}  // namespace

Activation activation_from_name(std::string_view name) {
  for (const auto& [known, activation] : kNamed) {
    if (name == known) return activation;
  }
  const size_t open = name.find('(');
  if (open == std::string_view::npos || name.back() != ')') unknown(name, "");
  const std::string_view kind = name.substr(0, open);
  if (kind != "swiglu" && kind != "softcap") unknown(name, "");
  Activation activation = kind == "swiglu" ? Activation::kSwiglu : Activation::kSoftcap;
  std::string_view rest = name.substr(open + 1, name.size() - open - 2);
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    set_parameter(activation, name, rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  if (activation.kind == Activation::kSoftcap &&
      !(std::isfinite(activation.gate_limit) && std::isfinite(activation.up_limit))) {
    unknown(name, ": it needs gate= and up=");
  }
  return activation;
}

}  // namespace torch_mesh
