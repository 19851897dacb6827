// The format of files that --config reads and --print-config writes: CLI11's TOML, but a '#' within
// quotes belongs to the value, as in TOML. The library ends a value at the first '#' anywhere.
#pragma once

#include <istream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

namespace writescope::server {

class ConfigFile : public CLI::ConfigBase {
 public:
  ConfigFile();
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

  // A validator of paths: empty, or why the file is not read. The library would wait for the writer
  // of a FIFO, and take "key=" for a key that is not there.
  static std::string Check(const std::string& path);

  // An error of the library's, in words that fit a configuration.
  static std::string Explain(const std::string& error);
};

}  // namespace writescope::server
