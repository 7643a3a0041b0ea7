// A backend that does what another one does. Tests override what they watch or change.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/backend.h"

namespace torch_mesh {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  void start() override { inner_->start(); }
  void submit(const ChunkRead& read) override { inner_->submit(read); }
  int32_t wait(std::chrono::microseconds timeout, std::span<ChunkResult> results) override {
    return inner_->wait(timeout, results);
  }
  void wake() override { inner_->wake(); }
  void change_buffer(const MemoryRegion& buffer, bool attached) override {
    inner_->change_buffer(buffer, attached);
  }
  void cancel() override { inner_->cancel(); }
  void stop() override { inner_->stop(); }
  const char* name() const override { return inner_->name(); }
  int32_t capacity() const override { return inner_->capacity(); }
  std::vector<std::string> notes() const override { return inner_->notes(); }

 protected:
  const std::unique_ptr<Backend> inner_;
};

}  // namespace torch_mesh
