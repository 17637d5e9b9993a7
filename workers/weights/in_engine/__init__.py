"""Files with torch alone, which engines import as top-level modules too, without this project."""
