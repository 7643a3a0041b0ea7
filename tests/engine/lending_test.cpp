// A pool that lends its slots to borrowers in this process and in children: the records they get,
// what remains after they end, and how the owner treats invalid requests.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "allocations.h"
#include "error_of.h"
#include "pool_fixture.h"
#include "residency/lending/lender.h"
#include "residency/lending/loan.h"
#include "residency/lending/protocol.h"

namespace torch_mesh {
namespace {

using namespace std::chrono_literals;
using lending::Answer;
using lending::Request;
using lending::Welcome;
using testing::error_of;
using testing::eventually;
using testing::is_record;
using testing::kRecord;
using testing::options_of;
using testing::record_of;

constexpr int32_t kLayers = 3, kExperts = 8;

// How many descriptors this process has open.
ptrdiff_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

struct Store : testing::TestStore {
  Store() : TestStore(kLayers, kExperts) {}
};

class LendingTest : public ::testing::Test {
 protected:
  LendingTest() {
    std::string folder = (std::filesystem::temp_directory_path() / "mesh_lend_XXXXXX").string();
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  ~LendingTest() override {
    lender_.reset();
    owner_.reset();
    std::filesystem::remove_all(folder_);
  }

  std::string path() const { return folder_ + "/socket"; }

  void lend(int32_t slots, int32_t borrowers, std::chrono::microseconds delay = 0us) {
    PoolOptions options = options_of(slots);
    options.sharing = Sharing::kShared;
    if (delay.count() > 0) {
      options.reader.interpose = with_faults({.delay = 1, .max_delay = delay});
    }
    owner_ = std::make_unique<Pool>(options, Runtime{}, store_.source(), nullptr);
    lender_ = std::make_unique<Lender>(*owner_, path(), borrowers);
  }

  std::shared_ptr<Loan> loan(std::chrono::milliseconds timeout = 5s) const {
    return std::make_shared<Loan>(path(), store_.source(), kRecord, timeout, Runtime{});
  }
  // The Welcome of an owner of this store that lends `borrowed` of its `slots`.
  Welcome welcome_of(int32_t borrowed, int32_t slots) const {
    return {.borrowed = borrowed,
            .layers = kLayers,
            .experts = kExperts,
            .slots = slots,
            .record_bytes = kRecord,
            .pool_bytes = slots * kRecord,
            .fingerprint = lending::fingerprint(store_.source())};
  }
  std::unique_ptr<Pool> borrow(std::chrono::milliseconds timeout = 20s) const {
    PoolOptions options = options_of(1);
    options.timeout = timeout;
    options.loan = loan();
    options.slots = options.loan->slots();
    return std::make_unique<Pool>(options, Runtime{}, store_.source(), nullptr);
  }

  // As an owner does that was killed.
  void leave_a_socket() const {
    const sockaddr_un address = lending::address_of(path());
    const Descriptor dead(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(bind(dead.get(), lending::generic(address), sizeof(address)), 0);
  }

  // Returns false if a byte of a record is wrong.
  static bool forward(Pool& pool, int32_t layer, std::vector<int32_t> experts) {
    std::vector<Claim::Entry> entries(experts.size());
    Claim claim(pool, layer, experts, entries);
    ReadyExpert ready;
    bool right = true;
    size_t count = 0;
    for (; claim.next({&ready, 1}) > 0; ++count) {
      right &= is_record(ready.record, layer, experts[ready.index]);
      claim.release({&ready, 1});
    }
    return right && count == experts.size();
  }
  static bool forwards(Pool& pool, int32_t count, uint32_t seed) {
    std::mt19937 random(seed);
    for (int32_t i = 0; i < count; ++i) {
      std::vector<int32_t> experts(kExperts);
      std::iota(experts.begin(), experts.end(), 0);
      std::ranges::shuffle(experts, random);
      experts.resize(1 + random() % kExperts);
      if (!forward(pool, static_cast<int32_t>(random() % kLayers), experts)) return false;
    }
    return true;
  }

  void expect_no_pins() {
    EXPECT_TRUE(eventually([&] { return lender_->borrowers() == 0 && owner_->pinned() == 0; }))
        << lender_->borrowers() << " borrowers, " << owner_->pinned() << " pins";
    owner_->drain();
    owner_->validate();
  }

  // A raw connection, for messages that no borrower would send.
  Descriptor stranger() const {
    Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const sockaddr_un address = lending::address_of(path());
    EXPECT_EQ(connect(socket.get(), lending::generic(address), sizeof(address)), 0);
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    Welcome welcome;
    EXPECT_EQ(recv(socket.get(), &welcome, sizeof(welcome), 0),
              static_cast<ssize_t>(sizeof(welcome)));
    return socket;
  }

  std::string folder_;
  Store store_;
  std::unique_ptr<Pool> owner_;
  std::unique_ptr<Lender> lender_;
};

TEST_F(LendingTest, BorrowersGetTheRecordsAndLeaveNoPins) {
  lend(8, 4, 200us);
  std::vector<std::thread> workers;
  std::atomic<int32_t> right{0};
  for (uint32_t worker = 0; worker < 4; ++worker) {
    workers.emplace_back([&, worker] {
      const auto pool = borrow();
      EXPECT_EQ(pool->slots(), 2);
      EXPECT_EQ(pool->memory_bytes(), 0);
      EXPECT_STREQ(pool->reader()->backend(), "shared");
      right += forwards(*pool, 200, worker);
      pool->validate();
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(right, 4);
  expect_no_pins();
}

TEST_F(LendingTest, ARecordThatOneBorrowerReadIsResidentForTheNext) {
  lend(kLayers * kExperts, 1, 1us);
  const std::vector<int32_t> experts{0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_TRUE(forward(*borrow(), 0, experts));
  expect_no_pins();
  const int64_t read = chunks_given();
  EXPECT_TRUE(forward(*borrow(), 0, experts));
  EXPECT_EQ(chunks_given(), read);
  EXPECT_TRUE(forward(*borrow(), 1, experts));
  EXPECT_GT(chunks_given(), read);
}

TEST_F(LendingTest, AnOwnersErrorReachesTheBorrowerAsItIs) {
  lend(4, 1);
  const auto pool = borrow();
  store_.truncate(kRecord + 100);
  const Error error = error_of([&] { pool->promote(0, std::vector<int32_t>{1}); });
  EXPECT_EQ(error.os_error(), ENODATA);
  EXPECT_NE(std::string(error.what()).find("was it replaced or truncated?"), std::string::npos);
  EXPECT_EQ(owner_->stats()[0].failed, 1) << "the borrower has repeated its request";
}

TEST_F(LendingTest, ABorrowerThatHoldsAllItsSlotsDoesNotBlockOthers) {
  lend(6, 2);
  const auto still = borrow();
  const std::vector<int32_t> experts{5, 6, 7};
  std::vector<Claim::Entry> entries(3);
  Claim claim(*still, 2, experts, entries);
  std::array<ReadyExpert, 3> ready;
  for (int32_t got = 0; got < 3;) got += claim.next(std::span(ready).subspan(got));
  const auto pool = borrow();
  EXPECT_TRUE(forwards(*pool, 200, 7));
  for (const ReadyExpert& each : ready) {
    EXPECT_TRUE(is_record(each.record, 2, experts[each.index]));
  }
}

TEST_F(LendingTest, ABorrowerBeyondTheNumberOfWorkersIsRefused) {
  lend(4, 1);
  auto pool = borrow();
  const auto refused = error_of([&] { loan(); });
  EXPECT_EQ(refused.kind(), ErrorKind::kRead);
  EXPECT_NE(std::string(refused.what()).find("--workers"), std::string::npos);
  pool.reset();
  expect_no_pins();
  EXPECT_TRUE(forwards(*borrow(), 10, 1));
}

TEST_F(LendingTest, KilledBorrowersLeaveNoPins) {
  lend(8, 2, 100us);
  const auto survivor = borrow();
  std::mt19937 random(20);
  for (int32_t kill = 0; kill < 20; ++kill) {
    const pid_t child = ::fork();
    if (child == 0) {
      // The parent has other threads, so the child does only the worker's own work.
      ::alarm(60);
      const auto pool = borrow();
      for (uint32_t i = 0;; ++i) {
        if (!forwards(*pool, 10, i)) ::_exit(1);
      }
    }
    EXPECT_TRUE(eventually([&] { return lender_->borrowers() == 2; }));
    EXPECT_TRUE(forwards(*survivor, 1 + static_cast<int32_t>(random() % 20), random()));
    ::kill(child, SIGKILL);
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    EXPECT_TRUE(eventually([&] { return lender_->borrowers() == 1; }));
    EXPECT_LE(owner_->pinned(), survivor->slots());
    owner_->validate();
  }
}

TEST_F(LendingTest, ABorrowerKilledWhileItConnectsLeavesNoPins) {
  lend(4, 2, 50us);
  std::mt19937 random(23);
  for (int32_t kill = 0; kill < 100; ++kill) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      for (;;) {
        if (!forwards(*borrow(), 3, 1)) ::_exit(1);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    expect_no_pins();
  }
  EXPECT_EQ(lender_->refused(), 0);
  EXPECT_TRUE(forwards(*borrow(), 20, 2));
}

TEST_F(LendingTest, AForkedChildOfAWorkerKeepsNoPinsWhenTheWorkerEnds) {
  lend(4, 1);
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t worker = ::fork();
  if (worker == 0) {
    const auto pool = borrow();
    if (!forwards(*pool, 5, 1)) ::_exit(1);
    const pid_t heir = ::fork();  // inherits the socket
    if (heir == 0) {
      ::alarm(60);
      for (;;) ::pause();
    }
    static_cast<void>(!::write(pipe[1], &heir, sizeof(heir)));
    ::_exit(0);
  }
  pid_t heir = 0;
  ASSERT_EQ(::read(pipe[0], &heir, sizeof(heir)), static_cast<ssize_t>(sizeof(heir)));
  ::waitpid(worker, nullptr, 0);
  expect_no_pins();
  ::kill(heir, SIGKILL);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST_F(LendingTest, AnInvalidRequestEndsTheConnection) {
  lend(6, 3);
  const auto other = borrow();
  const auto send_bytes = [&](const void* bytes, size_t count, bool before) {
    const int64_t refusals = lender_->refused();
    {
      const Descriptor socket = stranger();
      Answer answer;
      if (before) {
        const Request good{0, 1, 2};
        EXPECT_EQ(send(socket.get(), &good, sizeof(good), 0), static_cast<ssize_t>(sizeof(good)));
        EXPECT_EQ(recv(socket.get(), &answer, sizeof(answer), 0),
                  static_cast<ssize_t>(sizeof(answer)));
        EXPECT_EQ(answer.error, 0);
      }
      EXPECT_EQ(send(socket.get(), bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
      EXPECT_EQ(recv(socket.get(), &answer, sizeof(answer), 0), 0);
      EXPECT_EQ(lender_->refused(), refusals + 1);
      // Its record stays pinned until it closes the connection.
      EXPECT_EQ(owner_->pinned() >= 1, before || other->pinned() > 0);
      EXPECT_TRUE(forwards(*other, 5, static_cast<uint32_t>(refusals)));
    }
    EXPECT_TRUE(eventually([&] { return lender_->borrowers() == 1; }));
  };
  for (const Request& bad : {Request{-1, 0, 0}, Request{2, 0, 0}, Request{INT32_MAX, 0, 0},
                             Request{0, -1, 0}, Request{0, kLayers, 0}, Request{0, 0, -1},
                             Request{0, 0, kExperts}, Request{INT32_MIN, INT32_MIN, INT32_MIN}}) {
    send_bytes(&bad, sizeof(bad), true);
  }
  const std::array<std::byte, 4096> long_one{};
  send_bytes(long_one.data(), 1, true);
  send_bytes(long_one.data(), sizeof(Request) - 1, true);
  send_bytes(long_one.data(), sizeof(Request) + 1, true);
  send_bytes(long_one.data(), long_one.size(), true);
  EXPECT_TRUE(forwards(*other, 20, 3));
}

// A worker may read its records until it closes the connection, even after invalid requests.
TEST_F(LendingTest, RecordsOfAWorkerStayUntilItsConnectionIsClosed) {
  lend(6, 3);
  const auto other = borrow();
  const std::byte* shared = static_cast<const std::byte*>(
      mmap(nullptr, 6 * kRecord, PROT_READ, MAP_SHARED, owner_->shared_descriptor(), 0));
  ASSERT_NE(shared, MAP_FAILED);
  const auto nothing = [](int socket) { EXPECT_EQ(send(socket, nullptr, 0, MSG_NOSIGNAL), 0); };
  const auto nonsense = [](int socket) { EXPECT_EQ(send(socket, "?", 1, MSG_NOSIGNAL), 1); };
  const auto end = [](int socket) { EXPECT_EQ(shutdown(socket, SHUT_WR), 0); };
  const std::vector<std::vector<std::function<void(int)>>> ways{
      {nothing}, {end}, {nothing, end}, {nonsense, end}, {nothing, nothing, nonsense}};
  for (size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE(way);
    {
      const Descriptor socket = stranger();
      const Request good{0, 1, 2};
      Answer answer;
      ASSERT_EQ(send(socket.get(), &good, sizeof(good), 0), static_cast<ssize_t>(sizeof(good)));
      ASSERT_EQ(recv(socket.get(), &answer, sizeof(answer), 0),
                static_cast<ssize_t>(sizeof(answer)));
      for (const auto& misbehave : ways[way]) {
        misbehave(socket.get());
        EXPECT_TRUE(
            eventually([&] { return lender_->refused() == static_cast<int64_t>(way) + 1; }));
      }
      EXPECT_EQ(recv(socket.get(), &answer, sizeof(answer), MSG_PEEK), 0) << "it is told";
      EXPECT_TRUE(forwards(*other, 100, static_cast<uint32_t>(way)));
      EXPECT_EQ(lender_->borrowers(), 2);
      EXPECT_TRUE(is_record(shared + answer.offset, 1, 2));
    }
    EXPECT_TRUE(eventually([&] { return lender_->borrowers() == 1; }));
  }
  munmap(const_cast<std::byte*>(shared), 6 * kRecord);
}

TEST_F(LendingTest, WorksAfterTheDescriptorLimitFallsBelowTheOpenOnes) {
  lend(8, 4);
  const auto pool = borrow(), other = borrow();
  rlimit limits{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limits), 0);
  rlimit none = limits;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool right = forwards(*pool, 20, 1) && forwards(*other, 20, 2);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limits), 0);
  EXPECT_TRUE(right);
  EXPECT_TRUE(forwards(*borrow(), 5, 3));
}

TEST_F(LendingTest, EveryAllocationMayFail) {
  PoolOptions options = options_of(4);
  options.sharing = Sharing::kShared;
  owner_ = std::make_unique<Pool>(options, Runtime{}, store_.source(), nullptr);
  const std::string at = path();
  const ptrdiff_t before = open_descriptors();
  const auto attempt = [](const std::function<void()>& call) {
    return [&] {
      try {
        call();
      } catch (const std::bad_alloc&) {
      } catch (const Error&) {
      }
    };
  };
  const std::function<void()> lend_once = [&] { Lender(*owner_, at, 2); };
  testing::with_each_allocation_failing([&] {
    attempt(lend_once)();
    EXPECT_NE(::access(at.c_str(), F_OK), 0);
  });
  EXPECT_EQ(open_descriptors(), before);

  owner_ = std::make_unique<Pool>(options, Runtime{}, store_.source(), nullptr);
  lender_ = std::make_unique<Lender>(*owner_, at, 2);
  const std::function<void()> borrow_once = [&] { forwards(*borrow(2s), 1, 1); };
  testing::with_each_allocation_failing(attempt(borrow_once));
  expect_no_pins();
  EXPECT_TRUE(forwards(*borrow(), 20, 2));
}

TEST_F(LendingTest, ASecondRequestForAPendingSlotEndsTheConnection) {
  lend(4, 2, 20ms);
  const Descriptor socket = stranger();
  for (const int32_t expert : {1, 2}) {
    const Request request{0, 0, expert};
    ASSERT_EQ(send(socket.get(), &request, sizeof(request), 0),
              static_cast<ssize_t>(sizeof(request)));
  }
  Answer answer;
  EXPECT_EQ(recv(socket.get(), &answer, sizeof(answer), 0), 0);
  EXPECT_EQ(lender_->refused(), 1);
}

TEST_F(LendingTest, ABorrowerThatReadsNoAnswersDoesNotBlockOthers) {
  lend(4, 2);
  const Descriptor socket = stranger();
  for (int32_t i = 0; i < 100000 && lender_->refused() == 0; ++i) {
    const Request request{0, i % kLayers, i % kExperts};
    static_cast<void>(!send(socket.get(), &request, sizeof(request), MSG_DONTWAIT | MSG_NOSIGNAL));
  }
  EXPECT_TRUE(forwards(*borrow(), 50, 5));
}

TEST_F(LendingTest, AnotherStoreIsRefused) {
  lend(4, 2);
  const testing::RecordFile other(kLayers, kExperts, [](int32_t layer, int32_t expert) {
    return record_of(layer, expert ^ 1);
  });
  for (const auto& [source, bytes] :
       {std::pair{other.source(), kRecord}, std::pair{store_.source(), kRecord / 2}}) {
    const auto error = error_of([&] { Loan(path(), source, bytes, 5s, Runtime{}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
    EXPECT_NE(std::string(error.what()).find("another store"), std::string::npos);
  }
  expect_no_pins();
}

TEST_F(LendingTest, AMissingASilentAndAWrongOwnerAreDistinctErrors) {
  const auto nobody = error_of([&] { loan(); });
  EXPECT_EQ(nobody.kind(), ErrorKind::kRead);
  EXPECT_NE(std::string(nobody.what()).find("torch-mesh share STORE --socket"), std::string::npos);

  const sockaddr_un address = lending::address_of(path());
  const auto* at = lending::generic(address);
  const Descriptor silent(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(silent.get(), at, sizeof(address)), 0);
  ASSERT_EQ(listen(silent.get(), 8), 0);
  const auto late = error_of([&] { loan(100ms); });
  EXPECT_EQ(late.kind(), ErrorKind::kTimeout) << late.what();

  std::thread noise([&] {
    const Descriptor one(accept(silent.get(), nullptr, nullptr));  // of the loan that timed out
    const Descriptor two(accept(silent.get(), nullptr, nullptr));
    const std::array<char, 200> bytes{"hello"};
    static_cast<void>(!send(two.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    char end;
    static_cast<void>(!recv(two.get(), &end, 1, 0));
  });
  const auto wrong = error_of([&] { loan(); });
  noise.join();
  EXPECT_EQ(wrong.kind(), ErrorKind::kInvalid) << wrong.what();
}

TEST_F(LendingTest, ASocketLeftBehindIsReplacedAndAFileIsNot) {
  leave_a_socket();
  lend(4, 2);
  EXPECT_EQ(std::filesystem::status(path()).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const auto second = error_of([&] { Lender(*owner_, path(), 1); });
  EXPECT_EQ(second.kind(), ErrorKind::kInvalid);
  EXPECT_TRUE(forwards(*borrow(), 5, 1));
  lender_.reset();
  EXPECT_FALSE(std::filesystem::exists(path()));
  const Descriptor file(::open(path().c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  const auto occupied = error_of([&] { Lender(*owner_, path(), 1); });
  EXPECT_EQ(occupied.kind(), ErrorKind::kInvalid);
  EXPECT_TRUE(std::filesystem::exists(path()));
}

TEST_F(LendingTest, ABorrowerUsesItsRecordsAfterTheOwnerIsGone) {
  lend(8, 2);
  const auto pool = borrow();
  ASSERT_TRUE(forward(*pool, 1, {0, 1, 2, 3}));
  lender_.reset();
  owner_.reset();
  EXPECT_TRUE(forward(*pool, 1, {3, 2, 1, 0}));
  for (int32_t i = 0; i < 3; ++i) {
    const auto error = error_of([&] { forward(*pool, 2, {4}); });
    EXPECT_EQ(error.kind(), ErrorKind::kRead) << "and not kTimeout: " << error.what();
    EXPECT_EQ(error.os_error(), ECONNRESET);
    EXPECT_NE(std::string(error.what()).find("torch-mesh share"), std::string::npos);
  }
  pool->validate();
}

TEST_F(LendingTest, AFailedReadReachesTheBorrowerThatWaitsForIt) {
  lend(8, 2);
  const auto pool = borrow();
  const Source& source = store_.source();
  const Extent& extent = source.extents_of(source.id_of(1, 3))[0];
  store_.write(extent.offset + 5, std::vector<std::byte>(1, std::byte{0xee}));
  const auto wrong = error_of([&] { forward(*pool, 1, {3}); });
  EXPECT_EQ(wrong.kind(), ErrorKind::kChecksum) << wrong.what();
  EXPECT_TRUE(forward(*pool, 1, {2, 4}));
  store_.write(extent.offset, record_of(1, 3));
  EXPECT_TRUE(forward(*pool, 1, {3}));
  store_.truncate(source.extents_of(source.id_of(2, 7))[0].offset);
  const auto gone = error_of([&] { forward(*pool, 2, {7}); });
  EXPECT_EQ(gone.kind(), ErrorKind::kRead) << gone.what();
  EXPECT_TRUE(forward(*pool, 2, {6}));
}

TEST_F(LendingTest, NobodyElseCanWriteToASharedPool) {
  lend(4, 2);
  const int descriptor = owner_->shared_descriptor();
  EXPECT_EQ(mmap(nullptr, kRecord, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0), MAP_FAILED);
  EXPECT_NE(ftruncate(descriptor, kRecord), 0);
  EXPECT_EQ(pwrite(descriptor, "x", 1, 0), -1);
}

// A memfd. Owners share sealed ones, whose size is fixed.
Descriptor shared_memory(int64_t bytes, bool sealed) {
  Descriptor memory(memfd_create("lending_test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(memory.get(), bytes), 0);
  if (sealed) {
    EXPECT_EQ(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  }
  return memory;
}

// Sends its first client the Welcome with these descriptors, and nothing more.
class SilentOwner {
 public:
  // `before` runs in the owner's thread, after accept() and before the Welcome.
  SilentOwner(
      const std::string& path, const Welcome& welcome, std::vector<int> descriptors,
      std::function<void()> before = [] {})
      : listening_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    const sockaddr_un address = lending::address_of(path);
    EXPECT_EQ(bind(listening_.get(), lending::generic(address), sizeof(address)), 0);
    EXPECT_EQ(listen(listening_.get(), 8), 0);
    thread_ = std::thread(
        [this, welcome, descriptors = std::move(descriptors), before = std::move(before)] {
          peer_ = Descriptor(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
          before();
          iovec part{const_cast<Welcome*>(&welcome), sizeof(welcome)};
          alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> beside{};
          msghdr header{};
          header.msg_iov = &part;
          header.msg_iovlen = 1;
          if (!descriptors.empty()) {
            const size_t bytes = descriptors.size() * sizeof(int);
            header.msg_control = beside.data();
            header.msg_controllen = CMSG_SPACE(bytes);
            cmsghdr* control = CMSG_FIRSTHDR(&header);
            control->cmsg_level = SOL_SOCKET;
            control->cmsg_type = SCM_RIGHTS;
            control->cmsg_len = CMSG_LEN(bytes);
            std::memcpy(CMSG_DATA(control), descriptors.data(), bytes);
          }
          static_cast<void>(!sendmsg(peer_.get(), &header, MSG_NOSIGNAL));
        });
  }
  ~SilentOwner() {
    shutdown(listening_.get(), SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
  }

  void hang_up() {
    thread_.join();
    peer_.reset();
  }

 private:
  Descriptor listening_;
  Descriptor peer_;
  std::thread thread_;
};

TEST_F(LendingTest, AnOwnerThatDoesNotAnswerDoesNotBlockClose) {
  const Descriptor memory = shared_memory(4 * kRecord, true);
  SilentOwner owner(path(), welcome_of(4, 4), {memory.get()});
  auto pool = borrow(200ms);
  const auto late = error_of([&] { forward(*pool, 1, {3}); });
  EXPECT_EQ(late.kind(), ErrorKind::kTimeout) << late.what();
  EXPECT_NE(std::string(late.what()).find("owner of the pool at " + path()), std::string::npos)
      << late.what();
  pool->prefetch(2, std::vector<int32_t>{1, 2});
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    pool.reset();
    closed = true;
  });
  EXPECT_TRUE(eventually([&] { return closed.load(); }));
  owner.hang_up();
  closer.join();
}

TEST_F(LendingTest, AnOwnerThatLendsInvalidMemoryIsRefused) {
  const Descriptor sealed = shared_memory(4 * kRecord, true);
  const Descriptor open_ended = shared_memory(4 * kRecord, false);
  const Descriptor small = shared_memory(3 * kRecord, true);
  const Descriptor file(::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  ASSERT_EQ(ftruncate(file.get(), 4 * kRecord), 0);
  Welcome more = welcome_of(4, 4);
  more.borrowed = 5;
  Welcome negative = welcome_of(4, 4);
  negative.borrowed = -1;
  struct Case {
    const char* what;
    Welcome welcome;
    std::vector<int> descriptors;
  };
  const Case cases[] = {
      {"nothing", welcome_of(4, 4), {}},
      {"memory that may shrink", welcome_of(4, 4), {open_ended.get()}},
      {"less memory", welcome_of(4, 4), {small.get()}},
      {"a file", welcome_of(4, 4), {file.get()}},
      {"two", welcome_of(4, 4), {sealed.get(), open_ended.get()}},
      {"more places than slots", more, {sealed.get()}},
      {"fewer places than none", negative, {sealed.get()}},
  };
  for (const Case& each : cases) {
    const ptrdiff_t before = open_descriptors();
    {
      SilentOwner owner(path(), each.welcome, each.descriptors);
      const auto error = error_of([&] { loan(); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << each.what << ": " << error.what();
    }
    EXPECT_EQ(open_descriptors(), before) << each.what;
    std::filesystem::remove(path());
  }
}

TEST_F(LendingTest, NoFreeDescriptorForTheMemoryIsAnError) {
  const Descriptor memory = shared_memory(4 * kRecord, true);
  rlimit limits{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limits), 0);
  rlimit fewer = limits;
  fewer.rlim_cur = 3;  // three are open: of the test, the owner and the worker
  std::optional<Error> error;
  {
    SilentOwner owner(path(), welcome_of(4, 4), {memory.get()},
                      [&] { ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &fewer), 0); });
    error = error_of([&] { loan(); });
  }
  const int copy = dup(memory.get());
  const int refused = errno;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limits), 0);
  ASSERT_EQ(copy, -1);
  ASSERT_EQ(refused, EMFILE);
  EXPECT_EQ(error->kind(), ErrorKind::kRead) << error->what();
  EXPECT_EQ(error->os_error(), EMFILE);
}

TEST_F(LendingTest, AForkedChildDoesNotKeepTheSlotsOfAClosedPool) {
  lend(4, 1);
  auto pool = borrow();
  ASSERT_TRUE(forwards(*pool, 5, 1));
  const pid_t heir = ::fork();  // inherits the socket
  if (heir == 0) {
    ::alarm(60);
    for (;;) ::pause();
  }
  pool.reset();
  expect_no_pins();
  ::kill(heir, SIGKILL);
  ::waitpid(heir, nullptr, 0);
}

TEST_F(LendingTest, ConnectingToAFullQueueTimesOutOrIsInterrupted) {
  const sockaddr_un address = lending::address_of(path());
  const auto* at = lending::generic(address);
  const Descriptor silent(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(silent.get(), at, sizeof(address)), 0);
  ASSERT_EQ(listen(silent.get(), 0), 0);
  std::vector<Descriptor> waiting;
  do {
    waiting.emplace_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  } while (connect(waiting.back().get(), at, sizeof(address)) == 0);
  ASSERT_EQ(errno, EAGAIN);
  const auto late = error_of([&] { loan(300ms); });
  EXPECT_EQ(late.kind(), ErrorKind::kTimeout) << late.what();
  Runtime runtime;
  runtime.interrupted = [] { return true; };
  const auto error = error_of([&] { Loan(path(), store_.source(), kRecord, 60s, runtime); });
  EXPECT_EQ(error.kind(), ErrorKind::kInterrupted) << error.what();
}

TEST_F(LendingTest, OnlyOneOfSeveralOwnersTakesOverASocketLeftBehind) {
  constexpr int32_t kOwners = 4;
  for (int32_t round = 0; round < 50; ++round) {
    leave_a_socket();
    PoolOptions options = options_of(2);
    options.sharing = Sharing::kShared;
    std::array<std::unique_ptr<Pool>, kOwners> pools;
    for (auto& pool : pools) {
      pool = std::make_unique<Pool>(options, Runtime{}, store_.source(), nullptr);
    }
    std::array<std::unique_ptr<Lender>, kOwners> lenders;
    std::barrier begin(kOwners);
    std::vector<std::thread> threads;
    for (int32_t owner = 0; owner < kOwners; ++owner) {
      threads.emplace_back([&, owner] {
        begin.arrive_and_wait();
        try {
          lenders[owner] = std::make_unique<Lender>(*pools[owner], path(), 1);
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(std::ranges::count_if(lenders, [](const auto& lender) { return lender != nullptr; }),
              1);
    ASSERT_TRUE(forward(*borrow(), 1, {2}));
  }
}

TEST_F(LendingTest, APoolHasOneLender) {
  lend(4, 2);
  const Error second = error_of([&] { Lender(*owner_, folder_ + "/two", 2); });
  EXPECT_EQ(second.kind(), ErrorKind::kInvalid);
  EXPECT_NE(std::string(second.what()).find("lent already"), std::string::npos) << second.what();
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/two"));
  EXPECT_TRUE(owner_->lent());
  EXPECT_TRUE(forwards(*borrow(), 5, 1));  // the first lender still hears of reads that end
  lender_.reset();
  EXPECT_FALSE(owner_->lent());
}

TEST_F(LendingTest, InvalidWaysToLendAreRefused) {
  Pool own(options_of(4), Runtime{}, store_.source(), nullptr);
  for (const int32_t borrowers : {1, 0}) {
    const auto error = error_of([&] { Lender(own, path(), borrowers); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  }
  lend(4, 4);
  for (const int32_t borrowers : {0, -1, 5}) {
    const auto error = error_of([&] { Lender(*owner_, folder_ + "/two", borrowers); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
  }
  const auto far = error_of([&] { Lender(*owner_, std::string(200, 'x'), 1); });
  EXPECT_EQ(far.kind(), ErrorKind::kInvalid);
  EXPECT_EQ(error_of([&] { owner_->resize(2); }).kind(), ErrorKind::kInvalid);
}

}  // namespace
}  // namespace torch_mesh
