"""What mkdocs adds to the site when it is built."""

import json

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from alchemi_spec import MLIPSpec


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Publish the JSON schema of specifications."""
    files.append(File.generated(config, "schema/mlip-spec.json", content=json.dumps(MLIPSpec.json_schema(), indent=2)))
    return files
