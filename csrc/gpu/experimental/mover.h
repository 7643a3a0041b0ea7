// Experimental: dynamic placement (gpu={"placement": "dynamic"}). Nothing outside this folder needs
// it but bindings/device.cpp.
//
// Moves hot experts up to a device while a model runs: between two steps, a batch at a time, beside
// whatever computes.
//
// What should be there is what a policy of the pool's kind would keep in a cache of as many slots:
// it follows every forward, moves nothing, and costs next to nothing. What is there follows it, in
// batches, once an expert has been wanted for a while. A batch goes into spare slots; then the
// table is written once, in the order of the stream that computes, so that no forward sees half of
// it; and the slots that it freed are the next batch's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "gpu/driver.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

struct MoverOptions {
  // Has the records that go up, for as long as it lives: the pool's own engine, or one of the same
  // layers and experts in the format that the device has them in.
  std::weak_ptr<Engine> source;
  DeviceAddress records;  // [slots][record bytes of the source]
  DeviceAddress table;    // int32 [layers][experts], which holds `slots_of` already
  int32_t slots;
  std::vector<int32_t> slots_of;  // [layers * experts]: the slot of each expert, or -1
  // bool [layers]: their experts may move. A layer that is on the device as a whole is not seen by
  // the host, and one that computes elsewhere has no experts there.
  std::vector<bool> moving;
  int32_t batch = 4;  // slots that are kept spare, and so experts that move at a time
  std::string policy = "auto";
  int32_t patience = 32;  // forwards of its layer for which an expert has to be wanted
  // Makes a stream wait until all that reads the table has read it, but for that stream's own
  // work: HostShare::follow_inputs. None: nothing else does.
  std::function<void(Stream)> before_switch = nullptr;
};

struct MoverStats {
  int64_t moved_up = 0;
  int64_t batches = 0;
  int64_t bytes_up = 0;
  int64_t failed = 0;               // batches that were dropped because a read failed
  std::exception_ptr last_failure;  // of those
};

class Mover {
 public:
  Mover(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine, const MoverOptions& options);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // A forward of a layer used these, top_k each token. From any thread, a host node's among them.
  void used(int32_t layer, std::span<const int64_t> ids, int32_t top_k);

  // Between two steps of `compute`, the only stream whose kernels read the slots: enters what has
  // arrived, or sends for the next batch. Never waits, and does nothing in a capture. Returns how
  // many experts were entered.
  int32_t step(Stream compute);

  // Now, and waited for: `up` go to the device and `down` leave it. Other threads' moves come
  // before or after it. Error(kInvalid) for experts that are where they should go, for more than
  // the slots hold, and within a move of the same thread, which a signal handler interrupted. When
  // a read fails, what came before it has moved.
  void move(std::span<const ExpertId> up, std::span<const ExpertId> down, Stream compute);

  std::vector<int32_t> slots_of() const;
  MoverStats stats() const;

 private:
  // kMoving: of move(), which works without the lock; the batch and the slots are its own.
  enum class State : uint8_t { kIdle, kFetching, kFetched, kCopying, kMoving };

  void want(ExpertId id);
  void forget(ExpertId id);
  void choose();
  int64_t to_go() const;
  void work();
  size_t fetch(std::exception_ptr& failure);
  void send(Stream compute);
  int32_t enter(Stream compute);
  void begin_move(const Runtime& runtime);
  void end_move();
  void check_named(std::span<const ExpertId> up, std::span<const ExpertId> down) const;

  std::shared_ptr<Driver> driver_;
  std::weak_ptr<Engine> engine_;  // computes what is not on the device
  MoverOptions options_;
  int32_t experts_;  // of a layer
  int64_t record_bytes_;
  OwnedStream copy_;
  OwnedEvent copied_, switched_, arrived_;
  PinnedMemory staging_;  // [batch][record bytes]
  PinnedMemory table_;    // as the device's

  // What should be there. A lock of its own, since host nodes take it: no thread may hold it that
  // waits for the device.
  mutable std::mutex wanted_mutex_;
  std::unique_ptr<Policy> wanted_;
  std::vector<int64_t> wanted_since_;  // by its layer's forwards; -1: is not
  int32_t capacity_;                   // of what is wanted
  int32_t wanted_count_ = 0;
  std::vector<int64_t> forwards_;  // of each layer
  std::vector<int32_t> distinct_;
  std::vector<bool> seen_;  // of a layer's experts, by one forward

  // What is there. Taken before wanted_mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  std::thread::id moving_;  // the thread of the move under way
  bool ending_ = false;
  std::vector<ExpertId> up_, down_;  // of the batch under way
  std::vector<int32_t> into_;        // the slot of each of up_
  std::vector<int32_t> slots_of_;
  std::vector<int32_t> spare_;
  MoverStats stats_;
  std::thread worker_;  // reads records, which may take as long as a disk takes
};

}  // namespace torch_mesh
