"""Where candidates come from: releases of a package, days of the registry, commits of a clone."""
