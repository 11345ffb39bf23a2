"""The Chinese words of the scenes: what `mmbench_cn` needs, wording for wording as in English."""

# ruff: noqa: RUF001 - Chinese has its own question mark

SHAPES = ("圆形", "方形", "三角形", "菱形", "十字", "圆环", "星星", "爱心", "月亮", "箭头", "房子", "树")
COLORS = ("红色", "橙色", "黄色", "绿色", "蓝色", "紫色", "粉色", "棕色", "黑色", "白色")
SIZES = ("小", "中", "大")
PATTERNS = ("纯色", "条纹", "圆点")
PLACES = ("左上角", "上边", "右上角", "左边", "中间", "右边", "左下角", "下边", "右下角")
DIRECTIONS = ("左侧", "右侧", "上方", "下方")
REFER = {
    "name": "{}{}",
    "pair": "{}{}",
    "shape": "{}",
    "color": "{}的东西",
    "place": "{}的东西",
    "beside": "{1}{0}的东西",
}
ASK: dict[str, tuple[str, ...]] = {
    "color": ("{}是什么颜色？", "{}的颜色是什么？", "{}是哪种颜色？"),
    "shape": ("{}是什么形状？", "{}的形状是什么？", "{}是哪种形状？"),
    "place": ("{}在哪里？", "{}在什么位置？"),
    "count": ("有几个东西？", "东西有多少个？"),
    "sign": ("牌子上写着什么？", "牌子上是什么？", "牌子写的是什么？"),
    "identity": ("图里有哪个东西？", "有哪个东西？"),
}
BY_LETTER = "请回答字母。"
