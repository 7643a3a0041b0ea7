#include "residency/policies/policy.h"

#include <array>
#include <string>

#include "base/error.h"
#include "residency/policies/policies.h"

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

// What "auto" stands for: docs/decisions/0013-heat.md.
constexpr std::string_view kDefaultPolicy = "heat";

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options) {
  if (options.layers < 1 || options.experts < 1 || options.slots < 1) {
    throw Error(ErrorKind::kInvalid, "a policy needs at least one layer, expert and slot, not " +
                                         std::to_string(options.layers) + ", " +
                                         std::to_string(options.experts) + " and " +
                                         std::to_string(options.slots));
  }
  const std::string_view wanted = name == "auto" ? kDefaultPolicy : name;
  for (const NamedPolicy& policy : kPolicies) {
    if (policy.name == wanted) return policy.make(options);
  }
  std::string allowed = "auto";
  for (const NamedPolicy& policy : kPolicies) allowed += ", " + std::string(policy.name);
  throw Error(ErrorKind::kInvalid,
              "unknown policy \"" + std::string(name) + "\"; allowed are " + allowed);
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names{"auto"};
  for (const NamedPolicy& policy : kPolicies) names.push_back(policy.name);
  return names;
}

}  // namespace torch_mesh
