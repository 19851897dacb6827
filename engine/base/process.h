// What a server does first, whoever started it.
#pragma once

namespace writescope {

// Call once, before other threads and descriptors are there; never fails.
//
// Opens /dev/null for each of stdin, stdout and stderr that the parent left closed: the next file
// or socket would get its number, and log lines would go there.
//
// Ignores SIGPIPE and SIGXFSZ: a write to a stream that nobody reads, or to a log that has reached
// its limit of size, fails and ends nothing.
//
// Raises the limit of open descriptors to the hard one. Sessions and services often start at 1024,
// and gRPC's listener stops taking connections for ever once a single accept has failed for want of
// a descriptor. A hard limit below kFewDescriptors is logged as a warning, and so is any limit of
// addresses (ulimit -v): gRPC aborts where it cannot start a thread.
//
// An exception that nobody catches is logged before it ends the process.
void PrepareProcess();

// Whether everything printed on stdout was taken; logs why not. A file may be on a full disk, and
// half a configuration or plan must not look like a whole one.
bool StdoutTaken();

// Each connection takes one; a worker with nobody connected has about 60.
inline constexpr int kFewDescriptors = 1024;

}  // namespace writescope
