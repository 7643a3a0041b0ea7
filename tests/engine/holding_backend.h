#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "testing/forwarding_backend.h"

namespace torch_mesh::testing {

// Holds chunks back while `holds` says so.
class HoldingBackend final : public ForwardingBackend {
 public:
  using Holds = std::function<bool(int64_t offset)>;
  HoldingBackend(std::unique_ptr<Backend> inner, Holds holds)
      : ForwardingBackend(std::move(inner)), holds_(std::move(holds)) {}

  void submit(const ChunkRead& read) override { held_.push_back(read); }
  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    std::erase_if(held_, [&](const ChunkRead& read) {
      const bool passes = !holds_(read.offset);
      if (passes) inner_->submit(read);
      return passes;
    });
    return inner_->wait(
        held_.empty() ? timeout : std::min(timeout, std::chrono::microseconds(1000)), results);
  }

 private:
  const Holds holds_;
  std::vector<ChunkRead> held_;
};

}  // namespace torch_mesh::testing
