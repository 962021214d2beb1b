/* The least that an allreduce between two hosts can do over one TCP connection: each rank sends half of the float32
 * data and adds what it receives to the other half, then they exchange the halves. Small data is exchanged whole. No
 * names, no order, no time limits. harness/peers.py calls it. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

enum { WHOLE = 16 << 10, CHUNK = 256 << 10 };

/* Sends `out` and receives as many bytes into `in`, at the same time; adds to `in` if `adds`. Returns -1 on errors. */
static int exchange(int fd, const char *out, char *in, size_t to_send, size_t to_receive, int adds) {
  static _Alignas(64) float chunk[CHUNK / sizeof(float)];
  size_t partly = 0; /* bytes in `chunk` that are no whole element yet */
  while (to_send > 0 || to_receive > 0) {
    int moved = 0;
    if (to_send > 0) {
      const ssize_t sent = send(fd, out, to_send, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno != EAGAIN) return -1;
      if (sent > 0) out += sent, to_send -= (size_t)sent, moved = 1;
    }
    if (to_receive > 0) {
      const size_t room = to_receive < CHUNK - partly ? to_receive : CHUNK - partly;
      char *const target = adds ? (char *)chunk + partly : in;
      const ssize_t got = recv(fd, target, adds ? room : to_receive, MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return -1;
      if (got > 0) {
        moved = 1;
        to_receive -= (size_t)got;
        if (adds) {
          const size_t have = partly + (size_t)got, count = have / sizeof(float);
          float *const sums = (float *)in;
          for (size_t i = 0; i < count; ++i) sums[i] += chunk[i];
          in += count * sizeof(float);
          partly = have - count * sizeof(float);
          memmove(chunk, (char *)chunk + count * sizeof(float), partly);
        } else {
          in += got;
        }
      }
    }
    if (!moved) {
      struct pollfd event = {fd, (short)((to_receive ? POLLIN : 0) | (to_send ? POLLOUT : 0)), 0};
      if (poll(&event, 1, -1) < 0 && errno != EINTR) return -1;
    }
  }
  return 0;
}

int bare_allreduce(int fd, int rank, float *data, size_t count) {
  const size_t bytes = count * sizeof(float);
  if (bytes <= WHOLE) {
    static float mine[WHOLE / sizeof(float)];
    memcpy(mine, data, bytes);
    return exchange(fd, (const char *)mine, (char *)data, bytes, bytes, 1);
  }
  const size_t half = count / 2, first = half * sizeof(float), second = bytes - first;
  char *const own = (char *)(rank == 0 ? data : data + half), *const other = (char *)(rank == 0 ? data + half : data);
  const size_t own_bytes = rank == 0 ? first : second, other_bytes = bytes - own_bytes;
  if (exchange(fd, other, own, other_bytes, own_bytes, 1)) return -1;
  return exchange(fd, own, other, own_bytes, other_bytes, 0);
}
