#include "residency/policies/policy.h"

#include <array>
#include <string>

#include "base/error.h"
#include "residency/policies/heat.h"
#include "residency/policies/lfu.h"
#include "residency/policies/lru.h"

namespace torch_mesh {
namespace {

template <typename Kind>
std::unique_ptr<Policy> make(const PolicyOptions& options) {
  return std::make_unique<Kind>(options);
}

struct NamedPolicy {
  std::string_view name;
  std::unique_ptr<Policy> (*make)(const PolicyOptions&);
};

constexpr std::array<NamedPolicy, 3> kPolicies{{
    {"lru", make<Lru>},
    {"lfu", make<Lfu>},
    {"heat", make<Heat>},
}};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options) {
  if (options.layers < 1 || options.experts < 1) {
    throw_invalid("a policy needs at least one layer and expert, not ", options.layers, " and ",
                  options.experts);
  }
  for (const NamedPolicy& policy : kPolicies) {
    if (policy.name == resolve_policy(name)) return policy.make(options);
  }
  std::string allowed = "auto";
  for (const NamedPolicy& policy : kPolicies) allowed += ", " + std::string(policy.name);
  throw_invalid("unknown policy \"", name, "\"; allowed are ", allowed);
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names{"auto"};
  for (const NamedPolicy& policy : kPolicies) names.push_back(policy.name);
  return names;
}

}  // namespace torch_mesh
