#include "residency/policies/policy.h"

#include <array>
#include <string>

#include "base/error.h"

namespace torch_mesh {
namespace {

struct NamedPolicy {
  std::string_view name;
  std::unique_ptr<Policy> (*make)(const PolicyOptions&);
};

constexpr std::array<NamedPolicy, 8> kPolicies{{
    {"lru", make_lru},
    {"lfu", make_lfu},
    {"slru", make_slru},
    {"2q", make_two_queues},
    {"sieve", make_sieve},
    {"s3fifo", make_s3fifo},
    {"wtinylfu", make_wtinylfu},
    {"heat", make_heat},
}};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options) {
  if (options.layers < 1 || options.experts < 1 || options.slots < 1) {
    throw_invalid("a policy needs at least one layer, expert and slot, not ", options.layers, ", ",
                  options.experts, " and ", options.slots);
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
