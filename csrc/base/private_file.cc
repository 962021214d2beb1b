#include "base/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/status.h"

namespace horoplug {
namespace {

constexpr mode_t kOwnerOnly = 0600;
// O_NONBLOCK: a pipe without a reader is rejected instead of blocking.
constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW;

// Why a file that existed must not be written; nullptr: it may be.
const char* objection(const struct stat& found) {
  if (!S_ISREG(found.st_mode)) return "it is not a regular file";
  if (found.st_uid != ::geteuid()) return "it belongs to another user; choose another name";
  if (found.st_nlink > 1) return "the file has a second name (a hard link); remove it first";
  return nullptr;
}

}  // namespace

int open_private_file(const std::string& path, const std::string& what) {
  const auto fail = [&](const std::string& why) {
    throw Error(HP_INVALID_ARGUMENT, what + " " + path + ": " + why);
  };
  int fd = ::open(path.c_str(), kFlags | O_CREAT | O_EXCL, kOwnerOnly);
  if (fd >= 0) return fd;  // its owner may seem to be another user on a network file system
  if (errno == EEXIST) fd = ::open(path.c_str(), kFlags);
  if (fd < 0) {
    const int error = errno;
    fail(error == ELOOP ? "it is a symbolic link; name the file itself"
                        : std::generic_category().message(error));
  }
  struct stat found{};
  const char* const why = ::fstat(fd, &found) != 0 ? "it cannot be examined" : objection(found);
  if (why != nullptr) {
    ::close(fd);
    fail(why);
  }
  // Fails only on file systems that have no permissions.
  if ((found.st_mode & 0777) != kOwnerOnly) static_cast<void>(::fchmod(fd, kOwnerOnly));
  return fd;
}

}  // namespace horoplug
