// writescope doctor: runs the program of that name that lies beside this one, since this one is a
// client and links no engine.
#pragma once

#include <string>
#include <vector>

namespace writescope::cli {

// Does not return when the program could be started.
int RunDoctor(const std::vector<std::string>& arguments);

}  // namespace writescope::cli
