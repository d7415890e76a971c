// Code that is wider than the page can be scrolled from the keyboard.
function makeReachable() {
  for (const code of document.querySelectorAll("pre > code")) {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
    else code.removeAttribute("tabindex");
  }
}
makeReachable();
window.addEventListener("load", makeReachable);
window.addEventListener("resize", makeReachable);
