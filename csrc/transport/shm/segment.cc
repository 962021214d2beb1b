#include "transport/shm/segment.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace horoplug {
namespace {

// Nobody can shrink the file, under whoever maps it, and nobody can forbid to extend or to write
// it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Segment Segment::create(const Fd& memfd, std::size_t bytes) {
  if (::ftruncate(memfd.get(), static_cast<off_t>(bytes)) != 0) {
    fail("cannot size a shared memory segment");
  }
  if (::fcntl(memfd.get(), F_ADD_SEALS, kSeals) != 0) fail("cannot seal a shared memory segment");
  return map_file(memfd.get(), bytes, 0);
}

Segment Segment::map(const Fd& memfd, std::size_t bytes, std::size_t offset) {
  // Before its size is read, which may change until it is sealed.
  const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    errno = EPERM;
    fail("a peer's shared memory segment is not sealed against shrinking");
  }
  struct stat status{};
  if (::fstat(memfd.get(), &status) != 0) fail("cannot inspect a peer's shared memory segment");
  if (static_cast<std::size_t>(status.st_size) < offset + bytes) {
    // Accessing memory beyond the end of the file would raise SIGBUS.
    errno = EINVAL;
    fail("a peer's shared memory segment is too small");
  }
  return map_file(memfd.get(), bytes, offset);
}

void Segment::extend(const Fd& memfd, std::size_t end) {
  // Unlike ftruncate, this cannot shrink a file that another process has just extended.
  if (::fallocate(memfd.get(), 0, static_cast<off_t>(end - 1), 1) != 0) {
    fail("cannot enlarge a shared memory segment");
  }
}

void Segment::discard(const Fd& memfd, std::size_t offset, std::size_t bytes) {
  // A failure only keeps the memory allocated.
  static_cast<void>(::fallocate(memfd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                static_cast<off_t>(offset), static_cast<off_t>(bytes)));
}

Segment Segment::map_file(int fd, std::size_t bytes, std::size_t offset) {
  void* address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (address == MAP_FAILED) fail("cannot map a shared memory segment");
  return {std::shared_ptr<std::byte>(static_cast<std::byte*>(address),
                                     [bytes](std::byte* data) { ::munmap(data, bytes); }),
          bytes};
}

Segment Segment::allocate(std::size_t bytes) {
  void* address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) fail("cannot allocate memory");
  return {std::shared_ptr<std::byte>(static_cast<std::byte*>(address),
                                     [bytes](std::byte* data) { ::munmap(data, bytes); }),
          bytes};
}

}  // namespace horoplug
