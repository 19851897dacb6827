#include "engine/base/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace writescope {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(AddressTest, ListensOnAPortOrAPath) {
  for (const char* address :
       {"127.0.0.1:50051", "localhost:0", "[::1]:65535", "[::]:1", "a-b.c:9"}) {
    EXPECT_THAT(CheckListenAddress(address), IsEmpty());
    EXPECT_THAT(CheckListenAddressOrPath(address), IsEmpty());
  }
  for (const char* address : {"", "host", ":", ":50051", "host:", "host:x", "host:-1", "host:65536",
                              "host:1.5", "::1:50051", "127.0.0.1:80:80", "http://host:80", "[::1]",
                              "unix:", "host:99999999999999999999"}) {
    EXPECT_THAT(CheckListenAddress(address), HasSubstr("host:port")) << address;
    EXPECT_THAT(CheckListenAddressOrPath(address), HasSubstr("nor unix:path")) << address;
  }
  EXPECT_THAT(CheckListenAddress("unix:/run/w.sock"), HasSubstr("host:port"));
  EXPECT_THAT(CheckListenAddressOrPath("unix:/run/w.sock"), IsEmpty());
}

TEST(AddressTest, FindsAServerWhereOneCanBe) {
  for (const char* address :
       {"127.0.0.1:1", "writescope.svc.cluster.local:50051", "[::1]:65535", "unix:/run/w.sock",
        "unix:///run/w.sock", "unix:w.sock", "unix-abstract:w", "dns:///name:50051", "dns:name",
        "dns://8.8.8.8/name:50051", "ipv4:127.0.0.1:50051,127.0.0.2:50051", "ipv6:[::1]:50051"}) {
    EXPECT_THAT(CheckServerAddress(address), IsEmpty());
  }
  for (const char* address : {"", "host", ":", ":50051", "host:", "host:0", "host:x", "host:65536",
                              "::1:50051", "http://host:50051", "unix:", "dns:", "dns://"}) {
    EXPECT_THAT(CheckServerAddress(address), HasSubstr("host:port")) << address;
  }
}

}  // namespace
}  // namespace writescope
