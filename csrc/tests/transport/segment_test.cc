// Tests of the memory files that ranks of one host pass to each other.
#include "transport/shm/segment.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "harness/memfd.h"

using namespace horoplug;

namespace {

constexpr std::size_t kBytes = 1 << 16;

Fd memory_file(unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING) {
  return Fd(new_memfd("horoplug-test", flags));
}

}  // namespace

TEST_CASE("a segment cannot be shrunk by any process that has its descriptor") {
  const Fd file = memory_file();
  const Segment own = Segment::create(file, kBytes);
  CHECK(::ftruncate(file.get(), 0) == -1);
  CHECK(errno == EPERM);
  // Nor can another seal keep it from growing.
  CHECK(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_GROW) == -1);
  Segment::extend(file, 2 * kBytes);
  const Segment peers = Segment::map(file, 2 * kBytes);
  own.data()[kBytes - 1] = std::byte{7};
  CHECK(peers.data()[kBytes - 1] == std::byte{7});
  CHECK(peers.data()[(2 * kBytes) - 1] == std::byte{0});
}

TEST_CASE("a peer's memory that the peer could shrink is not mapped") {
  const Fd unsealed = memory_file();
  REQUIRE(::ftruncate(unsealed.get(), kBytes) == 0);
  CHECK_THROWS_AS(Segment::map(unsealed, kBytes), std::system_error);
  REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_GROW) == 0);
  CHECK_THROWS_AS(Segment::map(unsealed, kBytes), std::system_error);
  REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) == 0);
  CHECK(Segment::map(unsealed, kBytes).size() == kBytes);
}

TEST_CASE("what is no memory file, or is too small, is not mapped") {
  char name[] = "/tmp/horoplug-segment-XXXXXX";
  const Fd plain(::mkstemp(name));
  REQUIRE(plain.get() >= 0);
  REQUIRE(::unlink(name) == 0);
  REQUIRE(::ftruncate(plain.get(), kBytes) == 0);
  CHECK_THROWS_AS(Segment::map(plain, kBytes), std::system_error);
  const Fd file = memory_file();
  const Segment own = Segment::create(file, kBytes);
  CHECK_THROWS_AS(Segment::map(file, kBytes, kBytes), std::system_error);
  CHECK_THROWS_AS(Segment::map(file, kBytes + 1), std::system_error);
}

TEST_CASE("memory that does not allow sealing cannot become a segment") {
  CHECK_THROWS_AS(Segment::create(memory_file(MFD_CLOEXEC), kBytes), std::system_error);
}
